"""SparseLoCo: codecs in parameters a second and core, bits on the wire, and loss at equal tokens.

Speeds are values over the processor time of one thread, on one array for all: the sparse codec, the reordering before
it, int8 and the codecs of four bits, and as the limit ``torch.topk`` alone. Bits are what a member sends in a round
over loopback with the library's own collective, divided by parameters, messages of agreement and vote included. Losses
are held-out, of members that train on text in one process with the library's inner loop, codecs and rules; all
contestants of a seed begin with the same weights and train on the same batches, DDP on those of a step at once.

Wall times are computed: steps at the speed at which one member has made them here alone, and for each round what a
member was seen to send and receive over loopback, through a link of so many Mbit/s down and up, one after the other;
for DDP each step a ring's share of fp32 gradients.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import torch
from torch import Tensor

from scripts.trainer_bench.crew import crew, load_average, progress
from tests.support.small_store import NUM_SHARDS, text_store
from trainer.aggregation import RuleConfig
from trainer.aggregation.sparse import Averaging, aggregate_sparse
from trainer.compression.sparse import CHUNK_VALUES, SPARSE, TOP_K, ChunkOrder
from trainer.compression.vectors import codec_named
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.model import build_model, preset
from trainer.outer.diloco import DiLoCoConfig, FlatLayout, OuterOptimizer, synchronised_parameters
from trainer.outer.sparseloco import SparseLoCoConfig

ASKED_VALUES_PER_S: Final = 100e6
ASKED_BITS: Final = 0.25
ASKED_LOSS: Final = 1.01
_VOCAB_ROWS: Final = 1024
_NUM_HELD_OUT: Final = 2
_SEQ_LEN = 64
_LINKS: Final = ((500.0, 110.0), (50.0, 10.0))  # Mbit/s down and up.
_TIMED_STEPS: Final = 20
_LOCAL: Final = "127.0.0.1"
_TIMEOUT_S: Final = 900.0
_DENSE: Final = ("int8", "e3m0", "int4")
_MATRIX = (4096, 4096)


def bench_sparse(arguments: argparse.Namespace) -> dict[str, Any]:
    """Speeds, bits and losses."""
    report: dict[str, Any] = {"load": [load_average()], "speed": speeds(arguments.sparse_repeats)}
    if arguments.sparse_wire_values:
        report["wire"] = dict(wire_bits(arguments.sparse_wire_values, arguments.members))
    if arguments.sparse_steps:
        report["loss"] = losses(arguments)
        report["wall"] = dict(wall_times(arguments))
    report["load"].append(load_average())
    print(as_text(report, arguments))
    return report


def speeds(repeats: int) -> dict[str, float]:
    """Values a second of processor time, one thread; the best of some tries."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        vector = torch.randn(math.prod(_MATRIX), generator=torch.Generator().manual_seed(0)) ** 3
        order, chunks = ChunkOrder.of([_MATRIX]), vector.view(-1, CHUNK_VALUES)
        payload = SPARSE.encode(vector)
        work: dict[str, Callable[[], object]] = {
            "sparse encode": lambda: SPARSE.encode(vector),
            "sparse decode": lambda: SPARSE.decode_sparse(payload, vector.numel()),
            "sparse decode, to a dense vector": lambda: SPARSE.decode(payload, vector.numel()),
            "chunk order": lambda: order.chunked(vector),
            "torch.topk alone": lambda: torch.topk(chunks.abs(), TOP_K, dim=1, sorted=False),
        }
        for name in _DENSE:
            codec = codec_named(name)
            encoded = codec.encode(vector)
            work[f"{name} encode"] = lambda codec=codec: codec.encode(vector)  # type: ignore[misc]
            work[f"{name} decode"] = lambda codec=codec, encoded=encoded: codec.decode(  # type: ignore[misc]
                encoded, vector.numel()
            )
        return {name: vector.numel() / min(_cpu_s(call) for _ in range(repeats)) for name, call in work.items()}
    finally:
        torch.set_num_threads(before)


def _cpu_s(call: Callable[[], object]) -> float:
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def wire_bits(values: int, members: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Bits a parameter that a member sends and receives in a round; a first round makes the connections."""
    with crew("genesis", members) as genesis:
        for codec in ("int8", "e3m0", "sparse"):
            opened = genesis.all("open", name=codec, host=_LOCAL, tls=False, compression=codec)
            genesis.all("meet", name=codec, peers=[each["peer"] for each in opened])
            for number in range(2):
                requests = [
                    {"name": codec, "index": number, "values": values, "seed": members * number + member}
                    for member in range(members)
                ]
                answers = genesis.each("round", requests, timeout_s=_TIMEOUT_S)
            genesis.all("close", name=codec)
            yield (
                codec,
                {
                    "members": min(answer["members"] for answer in answers),
                    "sent_bits": fmean(8 * answer["sent_bytes"] / values for answer in answers),
                    "received_bits": fmean(8 * answer["received_bytes"] / values for answer in answers),
                    "contribution_bits": 8 * codec_named(codec).encoded_bytes(values) / values,
                    "round_s": max(each["until_s"] for each in answers) - min(each["from_s"] for each in answers),
                },
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Some members that train together."""

    preset: str
    num_steps: int
    inner_steps: int
    members: int
    num_rows: int  # Of 64 tokens, a member and step.
    lr: float
    seed: int

    def inner(self) -> InnerConfig:
        """The inner loop of each, with a schedule over the whole run."""
        warmup = max(1, self.num_steps // 20)
        return InnerConfig(
            lr=self.lr,
            warmup_steps=warmup,
            decay_end_step=self.num_steps,
            seq_len=_SEQ_LEN,
            micro_batch_size=self.num_rows,
        )


def losses(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Held-out losses in nats a token, by seed, of all contestants at each H."""
    torch.set_num_threads(arguments.threads)
    found: dict[str, dict[str, list[float]]] = {str(number): {} for number in arguments.sparse_inner_steps}
    for seed in range(arguments.sparse_seeds):
        ddp: list[float] = []
        for inner_steps in arguments.sparse_inner_steps:
            training = _training(arguments, inner_steps, seed)
            for name, train in _contestants(training).items():
                if name not in (arguments.sparse_contestants or (name,)):
                    continue
                loss = ddp[0] if name == "ddp" and ddp else train()  # It has no rounds: the same for every H.
                if name == "ddp":
                    ddp.append(loss)
                found[str(inner_steps)].setdefault(name, []).append(loss)
                progress(f"sparse: H {inner_steps}, seed {seed}, {name}: {loss:.4f}")
    return found


def _training(arguments: argparse.Namespace, inner_steps: int, seed: int) -> Training:
    return Training(
        preset=arguments.sparse_preset,
        num_steps=arguments.sparse_steps,
        inner_steps=inner_steps,
        members=arguments.members,
        num_rows=arguments.sparse_rows,
        lr=arguments.sparse_lr,
        seed=seed,
    )


def wall_times(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Seconds of a whole run at each link, of DDP and of rounds by H, beside the bits that a round was seen to take."""
    step_s, num_values = _step_of(_training(arguments, 1, 0))
    members, num_steps = arguments.members, arguments.sparse_steps
    yield "step_s", {"step_s": step_s, "num_values": num_values}
    ring_bytes = 4 * num_values * 2 * (members - 1) / members
    yield "ddp", _wall(num_steps * step_s, num_steps, ring_bytes, ring_bytes, num_values)
    for codec, found in wire_bits(num_values, members):
        sent, received = (num_values * found[f"{way}_bits"] / 8 for way in ("sent", "received"))
        for inner_steps in arguments.sparse_inner_steps:
            num_rounds = -(-num_steps // inner_steps)
            yield f"{codec}, H {inner_steps}", _wall(num_steps * step_s, num_rounds, sent, received, num_values)


def _wall(compute_s: float, times: int, sent_bytes: float, received_bytes: float, num_values: int) -> dict[str, Any]:
    links = {
        f"{down:g}/{up:g}": compute_s + times * 8e-6 * (sent_bytes / up + received_bytes / down) for down, up in _LINKS
    }
    return {"times": times, "sent_bits": 8 * sent_bytes / num_values, "compute_s": compute_s, "wall_s": links}


def _step_of(training: Training) -> tuple[float, int]:
    """Seconds of a step of one member, and its parameters."""
    config, model = training.inner(), build_model(preset(training.preset, _VOCAB_ROWS), training.seed)
    loop = InnerLoop(model, make_optimizer(model, config), config, _batches(0, training), torch.device("cpu"))
    loop.step()
    began_s = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        loop.step()
    return (time.perf_counter() - began_s) / _TIMED_STEPS, sum(each.numel() for each in model.parameters())


def _contestants(training: Training) -> dict[str, Callable[[], float]]:
    return {
        "ddp": lambda: _averaged_gradients(training),
        "diloco int8": lambda: _rounds(training, _Dense(training, "int8")),
        "diloco e3m0": lambda: _rounds(training, _Dense(training, "e3m0")),
        "diloco int4": lambda: _rounds(training, _Dense(training, "int4")),
        "sparseloco": lambda: _rounds(training, _Sparse(training, "replicas")),
        "sparseloco, by senders": lambda: _rounds(training, _Sparse(training, "senders")),
    }


class _Dense:
    """DiLoCo: contributions and results encoded by a codec, with error feedback."""

    def __init__(self, training: Training, codec: str) -> None:
        config = DiLoCoConfig(inner_steps=training.inner_steps)
        self.outer = OuterOptimizer(config.outer_lr, config.outer_momentum)
        self._codec = codec_named(codec)
        self._residuals: dict[int, Tensor] = {}

    def result(self, layout: FlatLayout, differences: Sequence[Tensor]) -> Tensor:
        rows = []
        for member, difference in enumerate(differences):
            carried = difference + self._residuals.get(member, torch.zeros(()))
            rows.append(self._codec.decode(self._codec.encode(carried), layout.num_values))
            self._residuals[member] = carried - rows[-1]
        mean = torch.stack(rows).mean(0)
        return self._codec.decode(self._codec.encode(mean), layout.num_values)


class _Sparse:
    """SparseLoCo."""

    def __init__(self, training: Training, averaging: Averaging) -> None:
        self._config = SparseLoCoConfig(inner_steps=training.inner_steps, averaging=averaging)
        self.outer = OuterOptimizer(self._config.outer_lr, 0.0)
        self._residuals: dict[int, Tensor] = {}

    def result(self, layout: FlatLayout, differences: Sequence[Tensor]) -> Tensor:
        order, found = ChunkOrder.of(layout.shapes), []
        for member, difference in enumerate(differences):
            carried = order.chunked(difference)
            if member in self._residuals:
                carried += self._config.decay * self._residuals[member]
            found.append(SPARSE.decode_sparse(SPARSE.encode(carried), layout.num_values))
            found[-1].subtract_from(carried)
            self._residuals[member] = carried
        outcome = aggregate_sparse(found, [1.0] * len(found), RuleConfig(), self._config.averaging)
        return order.natural(outcome.vector)


def _rounds(training: Training, rounds: _Dense | _Sparse) -> float:
    config, shape = training.inner(), preset(training.preset, _VOCAB_ROWS)
    replicas = [build_model(shape, training.seed) for _ in range(training.members)]
    loops = [
        InnerLoop(replica, make_optimizer(replica, config), config, _batches(member, training), torch.device("cpu"))
        for member, replica in enumerate(replicas)
    ]
    named = [synchronised_parameters(replica) for replica in replicas]
    layout = FlatLayout.of(named[0])
    anchor = layout.gather(named[0])
    momentum = torch.zeros_like(anchor)
    for done in range(0, training.num_steps, training.inner_steps):
        for loop in loops:
            for _ in range(min(training.inner_steps, training.num_steps - done)):
                loop.step()
        differences = [anchor - layout.gather(parameters) for parameters in named]
        rounds.outer.step(anchor, momentum, rounds.result(layout, differences))
        for parameters in named:
            layout.scatter(anchor, parameters)
    return _held_out_loss(replicas[0])


def _averaged_gradients(training: Training) -> float:
    """One replica whose step has all members' batches: what DDP computes."""
    config = training.inner()
    config = InnerConfig(
        lr=config.lr,
        warmup_steps=config.warmup_steps,
        decay_end_step=config.decay_end_step,
        seq_len=_SEQ_LEN,
        micro_batch_size=training.num_rows,
        accumulation_steps=training.members,
    )
    model = build_model(preset(training.preset, _VOCAB_ROWS), training.seed)
    streams = [_batches(member, training) for member in range(training.members)]
    in_turn = (batch for batches in zip(*streams, strict=False) for batch in batches)
    loop = InnerLoop(model, make_optimizer(model, config), config, in_turn, torch.device("cpu"))
    for _ in range(training.num_steps):
        loop.step()
    return _held_out_loss(model)


def _batches(member: int, training: Training) -> Iterator[dict[str, Tensor]]:
    """Endless, from a shard of the member's own."""
    ids = _ids(member % (NUM_SHARDS - _NUM_HELD_OUT))
    generator = torch.Generator().manual_seed(1000 * training.seed + member)
    while True:
        starts = torch.randint(0, len(ids) - _SEQ_LEN - 1, (training.num_rows,), generator=generator)
        rows = ids[starts[:, None] + torch.arange(_SEQ_LEN + 1)]
        yield {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def _held_out_loss(model: torch.nn.Module) -> float:
    ids = torch.cat([_ids(NUM_SHARDS - number - 1) for number in range(_NUM_HELD_OUT)])
    starts = torch.arange(0, len(ids) - _SEQ_LEN - 1, 97)[:256]
    rows = ids[starts[:, None] + torch.arange(_SEQ_LEN + 1)]
    model.eval()
    with torch.no_grad():
        parts = [float(model(part[:, :-1], part[:, 1:])) for part in rows.split(32)]
    return fmean(parts)


def _ids(shard: int) -> Tensor:
    ids: Tensor = torch.load(text_store() / f"shard_{shard}.pt", mmap=True, weights_only=True)
    return ids.long()


def as_text(report: dict[str, Any], arguments: argparse.Namespace) -> str:
    """The report for people."""
    limit = report["speed"]["torch.topk alone"]
    lines = [f"sparse contributions   ({' to '.join(report['load'])})", "  million values a second and core"]
    for name, speed in report["speed"].items():
        asked = f"   asked {ASKED_VALUES_PER_S / 1e6:.0f}" if name in ("sparse encode", "sparse decode") else ""
        lines.append(f"  {name:36} {speed / 1e6:>8.0f}   {speed / limit:>6.2f} of torch.topk{asked}")
    for codec, found in report.get("wire", {}).items():
        asked = f"   asked {ASKED_BITS}" if codec == "sparse" else ""
        lines.append(
            f"  {codec:8} {found['contribution_bits']:>7.3f} bits a parameter in a contribution{asked};"
            f" a member of {found['members']} sends {found['sent_bits']:.3f} in a round of {found['round_s']:.2f} s"
        )
    for inner_steps, by_name in report.get("loss", {}).items():
        beside = fmean(by_name.get("diloco int8", [math.nan]))
        lines.append(
            f"  H {inner_steps}: {arguments.members} members, {arguments.sparse_preset}, {arguments.sparse_steps} steps"
            f" of {arguments.sparse_rows} x {_SEQ_LEN} tokens each, {arguments.sparse_seeds} seeds"
        )
        for name, found in by_name.items():
            asked = f"   asked {ASKED_LOSS}" if name == "sparseloco" else ""
            spread = f" ({min(found):.4f} to {max(found):.4f})"
            lines.append(f"  {name:24} {fmean(found):.4f}{spread}   {fmean(found) / beside:.4f} of int8 DiLoCo{asked}")
    if "wall" in report:
        step = report["wall"]["step_s"]
        lines.append(f"  {step['num_values']:,} parameters, {1e3 * step['step_s']:.0f} ms a step; s of a whole run at")
        for name, found in report["wall"].items():
            if name == "step_s":
                continue
            by_link = ", ".join(f"{link} Mbit/s {wall_s:,.0f} s" for link, wall_s in found["wall_s"].items())
            lines.append(
                f"  {name:24} {found['sent_bits']:>7.3f} bits a parameter sent, {found['times']} times: {by_link}"
            )
    return "\n".join(lines)
