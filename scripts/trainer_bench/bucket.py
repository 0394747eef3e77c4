"""What a round of four through a bucket stalls training, overlap off and on; and what links make of it.

The bucket is a folder on this machine, or ``--bucket-url``. One member is measured whole: gathering the parameters,
encoding, putting, looking, fetching, verifying, aggregating by the default rules, the outer step and the merge. The
three others put contributions that were encoded before; what they take of the machine meanwhile is not counted, as
they would be elsewhere. A stall is also printed in copies of the vector, a limit of the same memory in the same run.

Utilisation is computed, not measured: seconds of 500 steps (``--tokens-per-step``, ``--gpu-tflops``, ``--gpu-share``)
over those and a round's, in which bytes go out and come in one after the other, beside what was measured here.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import load_average, progress
from scripts.trainer_bench.outer import copies_s, seconds_of

_OTHERS = 3
_PART_VALUES = 1 << 24
_SHAPE_VALUES = 125_000_000
_OVERLAP_STEPS = 20
_LONGEST_PAUSE_S = 3.0  # Of a step, beside which a round goes on; on a machine so busy, stalls say little anyway.
_VOCAB_ROWS = 32_768
_INNER_STEPS = 500
_SEQ_LEN = 1024
_LINKS = ((500.0, 110.0, 0.97), (20.0, 5.0, 0.9))  # Mbit/s down and up, and the utilisation that is asked for.
ASKED_S = {"off": 3.0, "on": 0.1}


def bench_bucket(arguments: argparse.Namespace) -> dict[str, Any]:
    """All codecs, overlap off and on."""
    from trainer.model import flops_per_token, preset

    shape = preset(arguments.outer_preset, _VOCAB_ROWS)
    reached = arguments.gpu_tflops * 1e12 * arguments.gpu_share
    report: dict[str, Any] = {
        "preset": arguments.outer_preset,
        "load": [load_average()],
        "step_s": arguments.tokens_per_step * flops_per_token(shape, _SEQ_LEN) / reached,
        "codecs": {},
    }
    report["parts"] = {codec: part_times(codec) for codec in arguments.bucket_codecs}
    print(parts_text(report["parts"]), flush=True)
    for codec in arguments.bucket_codecs if arguments.bucket_rounds else ():
        with tempfile.TemporaryDirectory(prefix="genesis-bench-bucket-", dir=arguments.bucket_dir) as folder:
            url = f"{arguments.bucket_url}/{time.time_ns()}" if arguments.bucket_url else folder
            report["codecs"][codec] = bucket_stalls(arguments.outer_preset, codec, url, arguments.bucket_rounds)
            progress(f"{codec}: {report['codecs'][codec]}")
    report["load"].append(load_average())
    print(as_text(report), flush=True)
    return report


def part_times(codec: str) -> dict[str, float]:
    """Processor seconds of one core for the parts of a round of four, of a vector that is measured, per 125M values."""
    import torch

    from trainer.aggregation import RuleConfig
    from trainer.bucket_rounds.documents import payload_digest

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    vector, form = 1e-3 * torch.randn(_PART_VALUES), form_of(codec, num_threads=1)(_PART_VALUES)
    payloads = {}
    for number in range(_OTHERS + 1):
        payloads[str(number) * 64] = bytes(form.encode(vector + 3e-4 * torch.randn(_PART_VALUES)))
    own, weights = payloads["0" * 64], dict.fromkeys(payloads, 1.0)
    reference, left = torch.zeros(_PART_VALUES), vector.clone()
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: left.copy_(vector),
        "encode": lambda: form.encode(vector),
        "digests": lambda: [payload_digest(each) for each in payloads.values()],
        "aggregate": lambda: form.aggregate(payloads, weights, RuleConfig(), reference),
        "left out": lambda: form.left_out(left, own),
    }
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(3):
            began_s = time.thread_time()
            call()
            times.append(time.thread_time() - began_s)
        found[name] = median(times) * _SHAPE_VALUES / _PART_VALUES
    torch.set_num_threads(threads)
    return found | {"bits": 8 * len(own) / _PART_VALUES}


def parts_text(parts: dict[str, dict[str, float]]) -> str:
    """The parts for people."""
    lines = ["processor seconds of one core for the parts of a round of four members, per 125 million values:"]
    for codec, found in parts.items():
        total_s = sum(seconds for name, seconds in found.items() if name not in ("copy", "bits"))
        each = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.items() if name not in ("copy", "bits"))
        lines.append(
            f"  {codec} ({found['bits']:.2f} bits a value): {each}; together {total_s:.2f} s, "
            f"{total_s / found['copy']:.0f} copies of the vector"
        )
    return "\n".join(lines)


def form_of(codec: str, num_threads: int = 0) -> Callable[[int], Any]:
    """Returns what makes the form of vectors of some length."""
    from trainer.bucket_rounds.forms import DenseForm, SparseForm
    from trainer.compression.vectors import codec_named

    if codec == "sparse":
        return lambda num_values: SparseForm(num_values, num_threads=num_threads)
    return lambda num_values: DenseForm(codec_named(codec), num_values, num_threads)


def bucket_stalls(preset_name: str, codec: str, url: str, num_rounds: int) -> dict[str, Any]:
    """Stalls and costs of some rounds, of a model of that size."""
    import torch

    from trainer.model import Transformer, preset

    progress(f"rounds of {preset_name} in {codec} through {url}")
    with torch.device("meta"):
        model = Transformer(preset(preset_name, _VOCAB_ROWS))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    num_values = sum(parameter.numel() for parameter in model.parameters())
    report: dict[str, Any] = {"num_values": num_values, "copy_s": copies_s(num_values)}
    report |= _rounds(model, codec, f"{url}/off", overlap_steps=0, pause_s=0.0, num_rounds=num_rounds)
    progress(f"overlap off: {report['off_s']} s, of a processor {report['off_processor_s']} s")
    pause_s = min(_LONGEST_PAUSE_S, 3.0 * median(report["off_s"]) / _OVERLAP_STEPS + 0.01)
    report |= _rounds(model, codec, f"{url}/on", overlap_steps=_OVERLAP_STEPS, pause_s=pause_s, num_rounds=num_rounds)
    return report


class _WithOthers:
    """The measured member's collective; before each of its rounds the others have put what they bring."""

    def __init__(self, collective: Any, others: list[Any], payload: bytes, url: str) -> None:
        self._collective = collective
        self._others = others
        self._payload = payload
        self._url = url
        self.others_s = 0.0  # What the others took of the training thread's time, since it was last set to 0.
        self.others_processor_s = 0.0

    def reduce(self, contribution: Any) -> Any:
        """See `Collective`."""
        from trainer.bucket_rounds.documents import Claims, ContributionHeader, contribution_body, payload_digest
        from trainer.bucket_rounds.object_names import contribution_key

        began_s, processor_s = time.perf_counter(), time.process_time()
        for number, settings in enumerate(self._others):
            payload = bytearray(self._payload)
            payload[-1] = number + 1
            sha256 = payload_digest(payload)
            header = ContributionHeader(
                run_id=settings.run_id,
                member=settings.own_id,
                round_index=contribution.round_index,
                state_digest=contribution.state_digest,
                form=settings.form_of(contribution.vector.numel()).name,
                num_values=contribution.vector.numel(),
                payload_bytes=len(payload),
                payload_sha256=sha256,
                claims=Claims(num_batches=500, age_s=1.0, progress=1.0, vocabulary_rows=0),
            ).signed(settings.identity)
            key = contribution_key(contribution.round_index, settings.own_id, sha256)
            settings.place.put_once(key, contribution_body(header, payload))
        self.others_s += time.perf_counter() - began_s
        self.others_processor_s += time.process_time() - processor_s
        return self._collective.reduce(contribution)

    def requested(self) -> bool:
        """See `Collective`."""
        return False

    def close(self) -> None:
        """See `Collective`."""
        self._collective.close()


def _rounds(model: Any, codec: str, url: str, *, overlap_steps: int, pause_s: float, num_rounds: int) -> dict[str, Any]:
    """The seconds that each round costs the training thread; of the first, which touches new memory, none."""
    import torch

    from genesis.store import open_store
    from trainer.aggregation import RuleConfig
    from trainer.bucket_rounds.collective import BucketCollective
    from trainer.bucket_rounds.config import BucketConfig
    from trainer.bucket_rounds.place import Place
    from trainer.bucket_rounds.rules import RoundRules
    from trainer.bucket_rounds.settings import BucketSettings
    from trainer.network.rpc import Identity
    from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer

    def settings() -> Any:
        return BucketSettings(
            identity=Identity.create(),
            place=Place(open_store(url)),
            rules=RoundRules(run_id="bench", quorum=_OTHERS + 1, propose_after_s=1e-3),
            rule=RuleConfig(),
            config=BucketConfig(url=url, quorum=_OTHERS + 1, poll_interval_s=0.05),
            form_of=form_of(codec),
            round_timeout_s=600.0,
            invite_after_s=10.0,
        )

    own = settings()
    others = [replace(own, identity=Identity.create()) for _ in range(_OTHERS)]
    num_values = sum(parameter.numel() for parameter in model.parameters())
    payload = bytes(own.form_of(num_values).encode(1e-3 * torch.randn(num_values)))
    collective = _WithOthers(BucketCollective(own), others, payload, url)
    config = DiLoCoConfig(inner_steps=overlap_steps + 1, overlap_steps=overlap_steps)
    decay = 0.95 if codec == "sparse" else None
    trainer = DiLoCoTrainer(model, config, collective, residual_decay=decay)
    trainer.state_digest()
    # As pseudo-gradients are: no two values alike, which would be the sparse codec's slowest case.
    changes = [1e-4 * torch.randn(parameter.numel()).view_as(parameter) for parameter in model.parameters()]
    stalls: list[float] = []
    processor: list[float] = []
    own_thread: list[float] = []
    reports = []
    stall_s = thread_s = 0.0
    while len(stalls) <= num_rounds:
        time.sleep(pause_s)
        with torch.no_grad():
            for parameter, change in zip(model.parameters(), changes, strict=True):
                parameter.add_(change)
        collective.others_s = collective.others_s if overlap_steps else 0.0
        collective.others_processor_s = 0.0 if stall_s == 0.0 else collective.others_processor_s
        if stall_s == 0.0:
            began_s = time.process_time()
        found: list[Any] = []
        thread_began_s = time.thread_time()
        thread_s = 0.0 if stall_s == 0.0 else thread_s
        stall_s += seconds_of(lambda found=found: found.append(trainer.after_inner_step(500)))
        thread_s += time.thread_time() - thread_began_s
        if found[0] is None:
            continue
        if not found[0].committed:
            raise RuntimeError(f"expected a round through the bucket, found none: {found[0].error}")
        reports.append(found[0].report)
        stalls.append(stall_s - (0.0 if overlap_steps else collective.others_s))
        own_thread.append(thread_s)
        processor.append(time.process_time() - began_s - collective.others_processor_s)
        trainer.state_digest()
        stall_s = 0.0
    collective.close()
    last, name = reports[-1], "on" if overlap_steps else "off"
    return {
        f"{name}_s": stalls[1:],
        f"{name}_processor_s": processor[1:],
        f"{name}_thread_s": own_thread[1:],
        "sent_bytes": last.sent_bytes,
        "received_bytes": last.received_bytes,
        "members": len(last.members),
        "phases_s": list(last.phases[:2]),
    }


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['preset']}, rounds of {_OTHERS + 1} members through a bucket; {' to '.join(report['load'])}"]
    for codec, found in report["codecs"].items():
        copy_s, num_values = median(found["copy_s"]), found["num_values"]
        lines.append(
            f"  {codec}: {num_values:,} values, {8 * found['sent_bytes'] / num_values:.2f} bits each sent, "
            f"{found['received_bytes'] / 1e6:.1f} MB received; one copy of the vector takes {1e3 * copy_s:.0f} ms"
        )
        for overlap in ("off", "on"):
            stall_s = median(found[f"{overlap}_s"])
            lines.append(
                f"    a round stalls training {stall_s:.3f} s with overlap {overlap}: {stall_s / copy_s:.1f} copies "
                f"(asked: at most {ASKED_S[overlap]} s)"
            )
        alone_s, merge_s = median(found["off_processor_s"]), median(found["on_thread_s"])
        lines.append(
            f"    processor time of a whole round, overlap off: {alone_s:.2f} s on one core, {alone_s / copy_s:.0f} "
            f"copies; all {_OTHERS + 1} members on two cores {(_OTHERS + 1) * alone_s / 2:.1f} s"
        )
        lines.append(
            f"    processor time of the training thread in a round, overlap on: {merge_s:.3f} s, "
            f"{merge_s / copy_s:.1f} copies"
        )
        compute_s = _INNER_STEPS * report["step_s"]
        for down_mbit, up_mbit, asked in _LINKS:
            moved_s = 8e-6 * (found["sent_bytes"] / up_mbit + found["received_bytes"] / down_mbit)
            for how, off_s, on_s in (
                ("stalls as measured", median(found["off_s"]), median(found["on_s"])),
                ("processor times of one core", alone_s, merge_s),
            ):
                off = compute_s / (compute_s + moved_s + off_s)
                on = compute_s / (compute_s + max(0.0, moved_s - compute_s) + on_s)
                lines.append(
                    f"    {down_mbit:g}/{up_mbit:g} Mbit/s, {how}: {moved_s:.1f} s on the link beside {compute_s:.0f} s"
                    f" of {_INNER_STEPS} steps: utilisation {off:.4f} with overlap off, {on:.4f} with it on "
                    f"(asked {asked})"
                )
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this part."""
    parser.add_argument("--bucket-codecs", nargs="+", default=["sparse", "int8"], help="for bucket")
    parser.add_argument("--bucket-rounds", type=int, default=3, help="counted of each kind, for bucket; 0: parts alone")
    parser.add_argument("--bucket-url", default="", help="s3://bucket/prefix, for bucket; a folder by default")
    parser.add_argument("--bucket-dir", type=Path, default=None, help="where that folder is made, for bucket")
