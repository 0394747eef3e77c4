"""Populate against the limit and against the usual ways, in one run, with one vocabulary.

    python scripts/bench_populate.py                 # everything; some three minutes on two cores
    python scripts/bench_populate.py speed --workers 2 --copies 4
    python scripts/bench_populate.py peers
    python scripts/bench_populate.py commits         # the cost of a commit as the store grows
    python scripts/bench_populate.py memory          # peak memory of 6 and of 60 shards
    python scripts/bench_populate.py packed          # the transfer form: bytes a token, MB/s in and out
    python scripts/bench_populate.py ray             # the engine ray over the local one; what the driver costs a shard
    python scripts/bench_populate.py datatrove       # both engines over datatrove's executors (pip install datatrove)
    python scripts/bench_populate.py document        # a document of 200 MB: its checkpoint, and how long a stop takes

"Wall" times a whole command from its start to its end, imports and all. "Work" is what each program itself took after
its imports; ours then still includes starting its workers, opening the store and every commit. "Cpu" counts the
command's processor seconds instead, imports and workers included: what is left to compare on a machine that others use
too. Figures go to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
BASELINES = ROOT / "scripts" / "baselines"
SOURCE = "fineweb-edu"
PACKED_LEVELS = (None, 1, 2, 3, 4, 5, 6, 7, 9)
"""None: as `genesis populate` writes."""


@contextmanager
def workspace(arguments: argparse.Namespace) -> Iterator[Path]:
    """A folder on the disk to be measured, removed afterwards."""
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-populate-") as folder:
        yield Path(folder)


def corpus(arguments: argparse.Namespace, folder: Path, copies: int) -> list[str]:
    """The parquet files, ``copies`` times under different names."""
    originals = sorted(arguments.corpus.glob("*.parquet"))
    if not originals:
        sys.exit(f"no .parquet in {arguments.corpus}; give --corpus")
    inputs = folder / f"input-{copies}"
    if not inputs.exists():
        inputs.mkdir()
        for copy in range(copies):
            for original in originals:
                (inputs / f"{copy:02d}_{original.name}").symlink_to(original)
    return sorted(map(str, inputs.iterdir()))


def make_vocabulary(folder: Path, files: list[str]) -> Path:
    """Learns the standard vocabulary once and exports it; returns its folder."""
    from genesis.populate.planning import first_documents
    from genesis.sources import find_source, resolve
    from genesis.tokenizer import NeuroTokenizer, export_tokenizer
    from manifests import TOTAL_MERGES, builtin_sources

    plan = resolve(find_source(SOURCE, builtin_sources()), files[:4])
    tokenizer = NeuroTokenizer.empty()
    tokenizer.learn_merges(first_documents(plan, 10_000), TOTAL_MERGES, source=SOURCE, processes=2)
    vocabulary = folder / "vocabulary"
    vocabulary.mkdir()
    tokenizer.save(vocabulary / "tokenizer.json")
    export_tokenizer(tokenizer.to_file(), "hf", vocabulary)
    export_tokenizer(tokenizer.to_file(), "tiktoken", vocabulary)
    return vocabulary


def run_ours(folder: Path, vocabulary: Path, files: list[str], workers: int, *extra: str) -> tuple[int, float, float]:
    """One ``genesis populate``; returns text bytes, its own seconds and wall seconds."""
    store = folder / "store"
    store.mkdir()
    shutil.copy(vocabulary / "tokenizer.json", store)
    inputs = [argument for file in files for argument in ("--input", file)]
    command = [sys.executable, "-m", "genesis", "populate", "--source", SOURCE, "--store", str(store), "--json"]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--workers", str(workers), *inputs, *extra], capture_output=True, text=True, cwd=ROOT, check=False
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    shutil.rmtree(store)
    result = json.loads(done.stdout)
    return int(result["text_bytes"]), float(result["seconds"]), seconds


def run_baseline(
    name: str, folder: Path, tokenizer: Path, files: list[str], processes: int
) -> tuple[int, float, float]:
    """One baseline script; returns text bytes, its own seconds and wall seconds."""
    out = folder / "out"
    command = [sys.executable, str(BASELINES / f"{name}.py"), str(tokenizer), str(out), str(processes), *files]
    started = time.perf_counter()
    search_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search_path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    shutil.rmtree(out)
    shutil.rmtree(f"{out}-log", ignore_errors=True)  # By datatrove's the next run would find its tasks done.
    text_bytes, work_seconds = done.stdout.split()
    return int(text_bytes), float(work_seconds), seconds


def processor_s() -> float:
    """Processor time of the commands that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def bench_speed(arguments: argparse.Namespace) -> None:
    """Ours over the limit, with the transfer form and without, in turn; the median of the passes."""
    with workspace(arguments) as folder:
        files = corpus(arguments, folder, arguments.copies)
        vocabulary = make_vocabulary(folder, files)
        tokenizer = vocabulary / "hf" / "tokenizer.json"
        print(f"populate to a folder, {len(files)} parquet files, {arguments.passes} passes, MB/s of text (median)")
        print("packed: the transfer form too, as by default; plain: --no-packed; the limit writes none")
        columns = ("workers", "", "packed", "plain", "limit", "packed/limit", "plain/limit", "packed/plain")
        print(" ".join(f"{column:>12}" for column in columns))
        for workers in arguments.workers:
            runs = {
                "packed": partial(run_ours, folder, vocabulary, files, workers),
                "plain": partial(run_ours, folder, vocabulary, files, workers, "--no-packed"),
                "limit": partial(run_baseline, "limit", folder, tokenizer, files, workers),
            }
            rates: dict[str, dict[str, list[float]]] = {"wall": {}, "work": {}, "cpu": {}}
            for _ in range(arguments.passes):
                for side, run in runs.items():
                    before = processor_s()
                    text_bytes, work, wall = run()
                    for name, seconds in (("wall", wall), ("work", work), ("cpu", processor_s() - before)):
                        rates[name].setdefault(side, []).append(text_bytes / seconds / 1e6)
            for name, sides in rates.items():
                packed, plain, limit = (median(sides[side]) for side in runs)
                figures = f"{packed:>12.1f} {plain:>12.1f} {limit:>12.1f}"
                print(f"{workers:>12} {name:>12} {figures}", end=" ")
                print(f"{packed / limit:>12.2f} {plain / limit:>12.2f} {packed / plain:>12.2f}", flush=True)


def bench_peers(arguments: argparse.Namespace) -> None:
    """Ours over what most projects do, two workers each."""
    with workspace(arguments) as folder:
        files = corpus(arguments, folder, 1)
        many = corpus(arguments, folder, arguments.copies)
        vocabulary = make_vocabulary(folder, files)
        text_bytes, _, seconds = run_ours(folder, vocabulary, many, 2)
        ours = text_bytes / seconds / 1e6
        print(f"two workers, MB/s of text: genesis {ours:.1f}")
        tokenizers = {
            "megatron_way": vocabulary / "hf" / "tokenizer.json",
            "nanogpt_way": vocabulary / "tiktoken" / "genesis.tiktoken",
        }
        for name, tokenizer in tokenizers.items():
            subset = files[:1] if name == "megatron_way" else files
            text_bytes, work, _ = run_baseline(name, folder, tokenizer, subset, 2)
            peer = text_bytes / work / 1e6
            print(f"  {name:<13} {peer:6.1f} MB/s (without its imports): genesis is {ours / peer:.1f} times as fast")


def bench_commits(arguments: argparse.Namespace) -> None:
    """Seconds for storing and committing one tiny shard, over the life of a store."""
    import numpy as np

    from genesis.populate.commit_log import CommitLog
    from genesis.store import CachePolicy, open_store
    from manifests import ShardEntry, SourceCheckpoint, encode_shard, sha256_hex, shard_key

    tokens, window = 8, 500
    # In memory, so that the figure is the protocol's own and not the disk's mood; --folder measures a disk.
    arguments.folder = arguments.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    with workspace(arguments) as folder:
        commit_log = CommitLog(open_store(str(folder / "store")), tokens, source=SOURCE)
        commit_log.open()
        print(f"committing shards of {tokens} tokens one by one in {folder.parent}, mean ms each over {window}")
        laps: list[float] = []
        for shard_id in range(arguments.shards):
            started = time.perf_counter()
            body = encode_shard(np.full(tokens, shard_id))
            commit_log.store.put(shard_key(shard_id), body, cache=CachePolicy.IMMUTABLE, if_absent=True)
            entry = ShardEntry(
                id=shard_id, sha256=sha256_hex(body), size_bytes=len(body), tokens=tokens, source=SOURCE,
                first_document=shard_id, last_document=shard_id, next_merge_id=32_000,
            )  # fmt: skip
            position = SourceCheckpoint(
                documents_processed=shard_id + 1, last_shard_id=shard_id, leftover_tokens=(),
                timestamp="2026-01-01T00:00:00Z",
            )  # fmt: skip
            commit_log.commit_shards([entry], SOURCE, position)
            laps.append(time.perf_counter() - started)
            if len(laps) % window == 0:
                recent = laps[-window:]
                bar = "#" * round(sum(recent) / window * 1e3 * 10)
                print(f"  shards {shard_id + 1 - window:>5}-{shard_id:<5} {sum(recent) / window * 1e3:6.2f}  {bar}")
        first, last = fmean(laps[5:1005] or laps), fmean(laps[-1000:])
        print(f"first 1,000: {first * 1e3:.2f} ms, last 1,000: {last * 1e3:.2f} ms, ratio {last / first:.2f}")
        commit_log.close()


def bench_memory(arguments: argparse.Namespace) -> None:
    """Peak resident memory of the populating process and of its largest worker."""
    import psutil

    with workspace(arguments) as folder:
        files = corpus(arguments, folder, max(arguments.copies, 5))
        vocabulary = make_vocabulary(folder, files)
        for shards in (6, 60):
            peaks = {"parent": 0, "worker": 0}
            done = threading.Event()

            def watch(peaks: dict[str, int] = peaks, done: threading.Event = done) -> None:
                while not done.wait(0.05):
                    for child in psutil.Process().children(recursive=True):
                        try:
                            role = "worker" if "genesis.populate.worker" in child.cmdline() else "parent"
                            peaks[role] = max(peaks[role], child.memory_info().rss)
                        except psutil.NoSuchProcess:
                            continue

            watcher = threading.Thread(target=watch)
            watcher.start()
            run_ours(folder, vocabulary, files, 2, "--max-shards", str(shards))
            done.set()
            watcher.join()
            parent, worker = peaks["parent"] / 1e6, peaks["worker"] / 1e6
            print(f"{shards:>3} shards: parent {parent:.0f} MB, worker {worker:.0f} MB at most")


def bench_packed(arguments: argparse.Namespace) -> None:
    """Bytes a token and speed of the transfer form: as populate writes it, and at zstd's levels."""
    with workspace(arguments) as folder:
        shards = stored_ids(arguments.store or make_store(folder, corpus(arguments, folder, 1)))
    num_tokens = sum(len(ids) for ids, _ in shards)
    print(
        f"{len(shards)} shards, {num_tokens:,} ids; MB/s of uint16 by processor time, best of {arguments.passes} passes"
    )
    columns = ("level", "B/token", "worst", "/uint16", "/level 3", "in MB/s", "/level 3", "out MB/s", "/level 3")
    print(" ".join(f"{column:>10}" for column in columns))
    laps = [{level: packing(shards, level) for level in PACKED_LEVELS} for _ in range(arguments.passes)]
    best = {
        level: [min(figures) for figures in zip(*(lap[level] for lap in laps), strict=True)] for level in PACKED_LEVELS
    }
    mean_3, _, pack_s_3, unpack_s_3 = best[3]
    for level, (mean, worst, pack_s, unpack_s) in best.items():
        sizes = f"{mean:>10.3f} {worst:>10.3f} {mean / 2:>10.2f} {mean / mean_3:>10.2f}"
        pack = f"{2 * num_tokens / pack_s / 1e6:>10.0f} {pack_s_3 / pack_s:>10.2f}"
        unpack = f"{2 * num_tokens / unpack_s / 1e6:>10.0f} {unpack_s_3 / unpack_s:>10.2f}"
        print(f"{'as written' if level is None else level:>10} {sizes} {pack} {unpack}")


def make_store(folder: Path, files: list[str]) -> str:
    """A store of the corpus, as the command makes it."""
    store = folder / "store"
    command = [sys.executable, "-m", "genesis", "populate", "--source", SOURCE, "--store", str(store), *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return str(store)


def stored_ids(url: str) -> list[tuple[NDArray[np.int64], int]]:
    """Every shard's ids, and the size of the vocabulary it was written with."""
    from genesis.store import open_readable
    from manifests import Manifest, Segment, decode_shard, shard_key

    store = open_readable(url)
    manifest = Manifest.from_json(store.get("manifest.json").body)
    segments = [Segment.from_json(store.get(reference.key).body) for reference in manifest.index]
    entries = [entry for segment in segments for entry in segment.shards]
    return [(decode_shard(store.get(shard_key(entry.id)).body), entry.next_merge_id) for entry in entries]


def packing(shards: list[tuple[NDArray[np.int64], int]], level: int | None) -> tuple[float, float, float, float]:
    """Bytes a token, those of the worst shard, processor seconds to pack all and to unpack all."""
    from manifests import ShardImage, pack_ids, unpack_ids

    started = time.thread_time()
    packed = [pack_ids(ids, next_merge_id, level=level) for ids, next_merge_id in shards]
    pack_s = time.thread_time() - started
    image = ShardImage.empty(len(shards[0][0]))
    image.ids[:] = 0  # Its pages are there before the clock runs, as in a loader that uses an image again.
    started = time.thread_time()
    for body, (_, next_merge_id) in zip(packed, shards, strict=True):
        unpack_ids(body, image.ids, next_merge_id)
    unpack_s = time.thread_time() - started
    per_token = [len(body) / len(ids) for body, (ids, _) in zip(packed, shards, strict=True)]
    return sum(per_token) / len(per_token), max(per_token), pack_s, unpack_s


def median(values: list[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


DRIVER = """
import json, resource, sys, time
from genesis.cli import main
try:
    sys.exit(main())
finally:
    used = {"processor_s": time.process_time(), "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    print(json.dumps(used), file=open(FIGURES, "w"))
"""
"""Runs ``genesis`` and says what its process used, without the processes that it started."""


def run_driver(folder: Path, vocabulary: Path, files: list[str], shards: int) -> dict[str, float]:
    """One ``genesis populate --engine ray`` up to so many shards.

    Returns:
        ``processor_s`` and ``peak_kb`` of the driver, ``text_bytes``, and ``object_store_kb``: the most that the
        object store's memory took.
    """
    store, figures = folder / "store", folder / "figures.json"
    store.mkdir()
    shutil.copy(vocabulary / "tokenizer.json", store)
    inputs = [argument for file in files for argument in ("--input", file)]
    command = [sys.executable, "-c", DRIVER.replace("FIGURES", repr(str(figures))), "populate", "--source", SOURCE]
    command += ["--store", str(store), "--json", "--engine", "ray", "--workers", "2", "--max-shards", str(shards)]
    shared_before, peak, done = shared_kb(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], shared_kb() - shared_before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    ended = subprocess.run([*command, *inputs], capture_output=True, text=True, cwd=ROOT, check=False)
    done.set()
    watcher.join()
    if ended.returncode:
        sys.exit(ended.stderr)
    shutil.rmtree(store)
    text_bytes = json.loads(ended.stdout)["text_bytes"]
    return {**json.loads(figures.read_text()), "text_bytes": text_bytes, "object_store_kb": peak[0]}


def shared_kb() -> int:
    """Memory taken in /dev/shm, where Ray's object store is."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize // 1024


def bench_ray(arguments: argparse.Namespace) -> None:
    """The engine ray over the local one, two workers each, in turn; the driver's cost a shard and its memory."""
    with workspace(arguments) as folder:
        files = corpus(arguments, folder, max(arguments.copies, 5))
        vocabulary = make_vocabulary(folder, files)
        rates: dict[str, dict[str, list[float]]] = {"local": {}, "ray": {}}
        for _ in range(arguments.passes):
            for engine, sides in rates.items():
                text_bytes, work, wall = run_ours(folder, vocabulary, files, 2, "--engine", engine)
                for name, seconds in (("wall", wall), ("work", work)):
                    sides.setdefault(name, []).append(text_bytes / seconds / 1e6)
        print(f"two workers, {len(files)} parquet files, MB/s of text, median of {arguments.passes}; goal 0.70")
        for name in ("wall", "work"):
            local, ray = median(rates["local"][name]), median(rates["ray"][name])
            print(f"  {name}: local {local:.1f}, ray {ray:.1f}, ratio {ray / local:.2f}")
        few, many, more = (run_driver(folder, vocabulary, files, shards) for shards in (6, 60, 240))
        shard_s = (many["processor_s"] - few["processor_s"]) / 54
        text_mb = (many["text_bytes"] - few["text_bytes"]) / 54 / 1e6
        print(f"driver: {shard_s * 1e3:.1f} ms of processor time a shard of {text_mb:.1f} MB of text; goal 5")
        print(f"  so one driver can feed {text_mb / shard_s:.0f} MB/s of text")
        for name, figures in (("6", few), ("60", many), ("240", more)):
            driver, objects = figures["peak_kb"] / 1e3, figures["object_store_kb"] / 1e3
            print(f"  {name:>3} shards: driver {driver:.0f} MB, object store {objects:.0f} MB at most")


def bench_datatrove(arguments: argparse.Namespace) -> None:
    """Both engines over datatrove's two executors, the same vocabulary, two workers each; work without imports."""
    with workspace(arguments) as folder:
        files = corpus(arguments, folder, 1)
        many = corpus(arguments, folder, arguments.copies)
        vocabulary = make_vocabulary(folder, files)
        tokenizer = vocabulary / "hf" / "tokenizer.json"
        ours: dict[str, float] = {}
        for engine in ("local", "ray"):
            text_bytes, work, _ = run_ours(folder, vocabulary, many, 2, "--engine", engine)
            ours[engine] = text_bytes / work / 1e6
        for executor in ("local", "ray"):
            os.environ["DATATROVE_EXECUTOR"] = executor
            text_bytes, work, _ = run_baseline("datatrove_way", folder, tokenizer, files, 2)
            peer = text_bytes / work / 1e6
            print(
                f"datatrove, {executor} executor: {peer:.1f} MB/s; genesis --engine local {ours['local']:.1f} "
                f"({ours['local'] / peer:.1f} times), --engine ray {ours['ray']:.1f} ({ours['ray'] / peer:.1f} times); "
                "goal 15"
            )


def bench_document(arguments: argparse.Namespace) -> None:
    """A document of 200 MB: the largest checkpoints.json seen, and the seconds from SIGTERM in it to the end."""
    import signal

    import pyarrow as pa
    import pyarrow.parquet as pq

    with workspace(arguments) as folder:
        files = corpus(arguments, folder, 1)
        vocabulary = make_vocabulary(folder, files)
        texts = [text for file in files for text in pq.read_table(file, columns=["text"]).column(0).to_pylist()]
        long = "\n\n".join(texts) * 2
        long = long[: 200_000_000 * len(long) // len(long.encode())]
        path = folder / "long.parquet"
        pq.write_table(pa.table({"text": pa.array([texts[0], long, texts[1]], pa.large_string())}), path)
        print(f"a document of {len(long.encode()) / 1e6:.0f} MB, two workers")
        for after in (1, 4):
            store = folder / f"store-{after}"
            store.mkdir()
            shutil.copy(vocabulary / "tokenizer.json", store)
            command = [sys.executable, "-m", "genesis", "populate", "--source", SOURCE, "--store", str(store)]
            process = subprocess.Popen(
                [*command, "--workers", "2", str(path)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            largest = 0
            while process.poll() is None and not (store / f"shard_{after}.pt").exists():
                time.sleep(0.01)
            asked = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            while process.poll() is None:
                largest = max(largest, (store / "checkpoints.json").stat().st_size)
                time.sleep(0.01)
            largest = max(largest, (store / "checkpoints.json").stat().st_size)
            stop_s = time.perf_counter() - asked
            print(f"  stopped at shard {after}: {stop_s:.2f} s, checkpoints.json {largest / 1e3:.1f} kB")


BENCHES = {
    "speed": bench_speed,
    "peers": bench_peers,
    "commits": bench_commits,
    "memory": bench_memory,
    "packed": bench_packed,
    "document": bench_document,
}
WITH_EXTRAS = {"ray": bench_ray, "datatrove": bench_datatrove}
"""Parts that are measured only if they are named: they need what a plain installation lacks."""


def main() -> None:
    """Runs the parts named, or all."""
    known = {**BENCHES, **WITH_EXTRAS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(known)}; by default {', '.join(BENCHES)}")
    parser.add_argument("--corpus", type=Path, default=ROOT.parent / "shared" / "corpus" / "fineweb-edu")
    parser.add_argument("--folder", default=None, help="where to write; default the system's temporary folder")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--copies", type=int, default=4, help="times the corpus is read under different names")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--store", default=None, help="for packed: measure this store's shards; default, the corpus's")
    parser.add_argument("--shards", type=int, default=6000, help="for commits")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(known)
    if unknown:
        parser.error(f"unknown part {sorted(unknown)[0]!r}; known are {', '.join(known)}")
    for part in arguments.parts or BENCHES:
        known[part](arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
