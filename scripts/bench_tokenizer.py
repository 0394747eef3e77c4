#!/usr/bin/env python
"""How fast the tokenizer learns and encodes, as ratios against its peers in one run on one text.

    python scripts/bench_tokenizer.py [FOLDER_OF_PARQUET] [--json] [--documents N] [--rounds N]

- Learning: 31,734 merges from 10,000 documents by `NeuroTokenizer.learn_merges` and by Hugging Face's BpeTrainer with
  its own byte-level pre-tokenizer and the same pattern. Each run is a process of its own, in turn, so that caches and
  threads of one are not the other's; of several rounds the fastest counts, here and below. Memory is that of the
  process and its helpers, looked at twenty times a second.
- Encoding: text MB/s on one thread with the vocabulary just learned, to one array of ids. *Cold* is the first 20 MB of
  a new encoder, *unseen* the 20 MB of other documents after it. Slow peers read less, which is fair to them: only
  gigatoken gains from what it has read. *raw gigatoken* is the library called by itself, for what the wrapper costs.
- Vocabularies made elsewhere: as the models of GPT-2, Llama 3, Qwen (NFC) and one that is none of the well-known ones
  (digits one by one) have them, trained here by ``tokenizers`` on 2,000 of the documents. What `choose_encoder` takes
  encodes as a worker does, and ``tokenizers`` the same text after it; *chosen in* is what the choice costs at a start.

``--only`` leaves the other parts out. Both cores of a machine are used for learning (``--processes``), and nothing else
should be running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from genesis.tokenizer import (
    EncoderSpec,
    NeuroTokenizer,
    TiktokenEngine,
    choose_encoder,
    hf_tokenizer_json,
    import_vocabulary,
)
from genesis.tokenizer.frozen import encoding_form
from manifests.vocabulary import PATTERN, VocabularyFile

NUM_MERGES = 31_734
BATCH_BYTES = 4 << 20
PHASE_BYTES = 20 << 20
SLOW_PHASE_BYTES = 4 << 20
LEARNING_TIMEOUT_S = 900.0

Encode = Callable[[list[bytes]], int]


def main() -> None:
    """Runs the benchmark, or one learner of it, and prints what it found."""
    options = parse_arguments()
    if options.learner:
        print(json.dumps(LEARNERS[options.learner](options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.vocabulary = Path(folder) / "tokenizer.json"
        parts = PARTS if options.only is None else {options.only: PARTS[options.only]}
        report = {name: part(options) for name, part in parts.items()}
    print(json.dumps(report, indent=2) if options.json else as_text(report))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Path(__file__).resolve().parents[2] / "shared" / "corpus" / "fineweb-edu"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="parquet files with a column `text`")
    parser.add_argument("--documents", type=int, default=10_000, help="to learn from")
    parser.add_argument("--rounds", type=int, default=2, help="of everything, in turn; the fastest counts")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="for learning, the peer's threads too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", choices=["elsewhere"], help="nothing but the vocabularies made elsewhere")
    parser.add_argument("--learner", choices=list(LEARNERS), help=argparse.SUPPRESS)
    parser.add_argument("--vocabulary", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def read_documents(folder: Path, count: int | None = None, *, reverse: bool = False) -> list[bytes]:
    """The texts of all files in order of name, or from the last file backwards, so that the two ends do not meet."""
    files = sorted(folder.glob("*.parquet"), reverse=reverse)
    tables = (pq.read_table(file, columns=["text"])["text"].to_pylist() for file in files)
    return [text.encode() for text in islice((text for table in tables for text in table), count)]


def bench_learning(options: argparse.Namespace) -> dict[str, Any]:
    """Both learners in turn, the fastest run of each."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in LEARNERS}
    for _ in range(options.rounds):
        for name in LEARNERS:
            runs[name].append(learn_in_a_process(name, options))
    best = {name: min(found, key=lambda run: run["wall_s"]) for name, found in runs.items()}
    return best | {"times_hugging_face": best["hugging face"]["wall_s"] / best["genesis"]["wall_s"]}


def learn_in_a_process(learner: str, options: argparse.Namespace) -> dict[str, float]:
    """One run in a process of its own, with the most memory it and its helpers held together."""
    command = [sys.executable, __file__, str(options.folder), "--learner", learner]
    command += ["--documents", str(options.documents), "--processes", str(options.processes)]
    command += ["--vocabulary", str(options.vocabulary)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(options.processes)}
    peak_bytes = 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + LEARNING_TIMEOUT_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            peak_bytes = max(peak_bytes, resident_bytes_of_tree(process.pid))
            time.sleep(0.05)
        answer = process.communicate(timeout=60)[0]
    if process.returncode:
        raise SystemExit(f"learning with {learner} failed with status {process.returncode}")
    found: dict[str, float] = json.loads(answer)
    return found | {"peak_rss_mb": peak_bytes / 2**20}


def resident_bytes_of_tree(pid: int) -> int:
    """Resident memory of a process and its children; one that has just ended holds none."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    except psutil.Error:
        return total
    return total


def measured(work: Callable[[], int], text_bytes: int) -> dict[str, float]:
    """Times ``work``, which returns how many merges it learned."""
    begun = time.perf_counter()
    num_merges = work()
    wall_s = time.perf_counter() - begun
    return {"merges": num_merges, "text_mb": text_bytes / 1e6, "wall_s": wall_s}


def learn_with_genesis(options: argparse.Namespace) -> dict[str, float]:
    """Learns, and leaves the vocabulary for the encoders."""
    documents = read_documents(options.folder, options.documents)
    tokenizer = NeuroTokenizer.empty()
    result = measured(
        lambda: tokenizer.learn_merges(documents, NUM_MERGES, source="bench", processes=options.processes),
        sum(map(len, documents)),
    )
    tokenizer.save(options.vocabulary)
    return result


def learn_with_hugging_face(options: argparse.Namespace) -> dict[str, float]:
    """Learns as the library's own documentation does it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    documents = [document.decode() for document in read_documents(options.folder, options.documents)]
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_MERGES, min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )

    def work() -> int:
        tokenizer.train_from_iterator(documents, trainer)
        return tokenizer.get_vocab_size() - len(alphabet)

    return measured(work, sum(len(document.encode()) for document in documents))


LEARNERS = {"genesis": learn_with_genesis, "hugging face": learn_with_hugging_face}


def bench_encoding(options: argparse.Namespace) -> dict[str, Any]:
    """Every encoder on the same documents."""
    vocabulary = NeuroTokenizer.load(options.vocabulary).to_file()
    first = cut(read_documents(options.folder), PHASE_BYTES)
    others = cut(read_documents(options.folder, reverse=True), PHASE_BYTES)
    results = {name: {"cold_mb_s": 0.0, "unseen_mb_s": 0.0} for name in ENCODERS}
    for _ in range(options.rounds):
        for name, (make, phase_bytes) in ENCODERS.items():
            encode = make(vocabulary)
            for phase, documents in (("cold_mb_s", first), ("unseen_mb_s", others)):
                results[name][phase] = max(results[name][phase], speed(encode, cut(documents, phase_bytes)))
    ours = results["genesis"]
    ratios = {
        name: {phase: ours[phase] / result[phase] for phase in ours}
        for name, result in results.items()
        if name != "genesis"
    }
    return {"mb_s": results, "genesis_times": ratios}


def cut(documents: list[bytes], size_bytes: int) -> list[bytes]:
    """The first documents, of ``size_bytes`` in all."""
    sizes = np.cumsum([len(document) for document in documents])
    return documents[: int(np.searchsorted(sizes, size_bytes)) + 1]


def speed(encode: Encode, documents: list[bytes]) -> float:
    """Text MB/s over all documents, in batches of about 4 MB."""
    sizes = np.cumsum([len(document) for document in documents])
    borders = np.searchsorted(sizes, np.arange(BATCH_BYTES, int(sizes[-1]), BATCH_BYTES)).tolist()
    batches = [documents[a:b] for a, b in zip([0, *borders], [*borders, len(documents)], strict=True)]
    begun = time.perf_counter()
    num_ids = sum(encode(batch) for batch in batches)
    wall_s = time.perf_counter() - begun
    if not num_ids:
        raise SystemExit("expected text to encode, found none")
    return float(sizes[-1]) / 1e6 / wall_s


def encode_with_genesis(vocabulary: VocabularyFile) -> Encode:
    """`NeuroTokenizer` as a populate worker uses it."""
    tokenizer = NeuroTokenizer.from_bytes(vocabulary.to_json())
    tokenizer.encode(b"builds the encoder")
    return lambda texts: len(tokenizer.encode_batch(texts).ids)


def encode_with_raw_gigatoken(vocabulary: VocabularyFile) -> Encode:
    """The library by itself."""
    import gigatoken

    tokenizer = gigatoken.Tokenizer.from_json(hf_tokenizer_json(vocabulary))
    tokenizer.encode_batch([b"as above"], parallel=False)
    return lambda texts: len(tokenizer.encode_batch(texts, parallel=False).layout.content.data)


def encode_with_tiktoken(vocabulary: VocabularyFile) -> Encode:
    """The reference."""
    engine = TiktokenEngine(vocabulary)
    engine.encode_batch([b"as above"])
    return lambda texts: len(engine.encode_batch(texts).ids)


def encode_with_hugging_face(vocabulary: VocabularyFile) -> Encode:
    """``tokenizers``' fastest batch call."""
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_str(hf_tokenizer_json(vocabulary).decode())

    def encode(texts: list[bytes]) -> int:
        encodings = tokenizer.encode_batch_fast([text.decode() for text in texts])
        return len(np.concatenate([np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]))

    return encode


ENCODERS: dict[str, tuple[Callable[[VocabularyFile], Encode], int]] = {
    "genesis": (encode_with_genesis, PHASE_BYTES),
    "raw gigatoken": (encode_with_raw_gigatoken, PHASE_BYTES),
    "tiktoken": (encode_with_tiktoken, SLOW_PHASE_BYTES),
    "hugging face": (encode_with_hugging_face, SLOW_PHASE_BYTES),
}


MADE_ELSEWHERE_IDS = 32_000
MADE_ELSEWHERE_DOCUMENTS = 2_000


def made_elsewhere(form: str, documents: list[str]) -> str:
    """A tokenizer.json of a form that models in the wild have."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    digits = {"llama 3": r"\p{N}{1,3}", "qwen": r"\p{N}"}.get(form)
    tokenizer = Tokenizer(models.BPE(ignore_merges=form == "llama 3"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=digits is None)
    if digits is not None:
        split = pre_tokenizers.Split(Regex(words + digits + rest), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif form == "digits":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if form == "qwen":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=MADE_ELSEWHERE_IDS - 1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return str(tokenizer.to_str(pretty=True))


def bench_made_elsewhere(options: argparse.Namespace) -> dict[str, Any]:
    """What encodes each form, its speed, and that of ``tokenizers`` on the same text right after it."""
    documents = read_documents(options.folder, MADE_ELSEWHERE_DOCUMENTS)
    first = cut(read_documents(options.folder), PHASE_BYTES)
    others = cut(read_documents(options.folder, reverse=True), PHASE_BYTES)
    found: dict[str, Any] = {}
    for form in ("gpt-2", "llama 3", "qwen", "digits"):
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(made_elsewhere(form, [document.decode() for document in documents]), encoding="utf-8")
            vocabulary = import_vocabulary(str(path))
        begun = time.perf_counter()
        encoder = choose_encoder(vocabulary)
        chosen_s = time.perf_counter() - begun
        best = {"cold_mb_s": 0.0, "unseen_mb_s": 0.0, "tokenizers_cold_mb_s": 0.0, "tokenizers_unseen_mb_s": 0.0}
        for _ in range(options.rounds):
            slow = EncoderSpec(encoding_form(vocabulary), "tokenizers")
            phase_bytes = PHASE_BYTES if encoder.name == "gigatoken" else SLOW_PHASE_BYTES
            for prefix, spec, size_bytes in (("", encoder, phase_bytes), ("tokenizers_", slow, SLOW_PHASE_BYTES)):
                engine = spec.build()
                engine.encode_batch([b"builds the encoder"])
                for phase, texts in (("cold_mb_s", first), ("unseen_mb_s", others)):
                    mb_s = speed(
                        lambda batch, engine=engine: len(engine.encode_batch(batch).ids), cut(texts, size_bytes)
                    )
                    best[prefix + phase] = max(best[prefix + phase], mb_s)
        times = {phase: best[phase] / best[f"tokenizers_{phase}"] for phase in ("cold_mb_s", "unseen_mb_s")}
        found[form] = {"encoder": encoder.name, "chosen_in_s": chosen_s, **best, "times": times}
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "learning": bench_learning,
    "encoding": bench_encoding,
    "elsewhere": bench_made_elsewhere,
}


def as_text(report: dict[str, dict[str, Any]]) -> str:
    """The report for people."""
    lines = [] if "learning" not in report else own_lines(report["learning"], report["encoding"])
    lines.append("vocabularies made elsewhere, one thread, MB/s    chosen in   cold  unseen   tokenizers   times")
    for form, run in report["elsewhere"].items():
        times = run["times"]
        lines.append(
            f"  {form:10} by {run['encoder']:28} {run['chosen_in_s']:8.2f} s {run['cold_mb_s']:6.1f} "
            f"{run['unseen_mb_s']:7.1f}   {run['tokenizers_cold_mb_s']:4.1f} {run['tokenizers_unseen_mb_s']:5.1f}   "
            f"{times['cold_mb_s']:5.1f} {times['unseen_mb_s']:5.1f}"
        )
    return "\n".join(lines)


def own_lines(learning: dict[str, Any], encoding: dict[str, Any]) -> list[str]:
    """The lines of our own vocabulary."""
    lines = [f"learning {NUM_MERGES:,} merges"]
    for name in LEARNERS:
        run = learning[name]
        lines.append(
            f"  {name:14} {run['wall_s']:6.2f} s   peak {run['peak_rss_mb']:.0f} MB"
            f"   ({run['merges']:,} merges, {run['text_mb']:.1f} MB)"
        )
    lines.append(f"  genesis is {learning['times_hugging_face']:.2f} times as fast")
    lines.append("encoding, one thread, MB/s        cold  unseen   genesis is … times as fast")
    for name, result in encoding["mb_s"].items():
        ratio = encoding["genesis_times"].get(name)
        times = f"   {ratio['cold_mb_s']:5.2f} {ratio['unseen_mb_s']:5.2f}" if ratio else ""
        lines.append(f"  {name:28} {result['cold_mb_s']:7.1f} {result['unseen_mb_s']:7.1f}{times}")
    return lines


if __name__ == "__main__":
    main()
