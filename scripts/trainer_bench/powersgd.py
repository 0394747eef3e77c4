"""PowerSGD: bytes and processor time of a round on a model's shape, beside torch's own hook, and what it costs in loss.

The rounds are those of two members over loopback, with the library's own collective; bytes are what both send in one.
Vectors are random, which costs what any others do. torch's hook runs under DDP over gloo with as many members, on
gradients that are handed over by a backward pass that does nothing else; its processor time is that of the pass, less
that of the same without a hook. The loss is held-out, of synchronous training on text: at each step two members'
gradients of batches of their own are averaged, plain or factored with error feedback, at equal tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from scripts.trainer_bench.crew import crew, load_average
from tests.support.small_store import NUM_SHARDS, text_store
from trainer.compression.powersgd import (
    compress_p,
    compress_q,
    decompress,
    left_out,
    low_rank_plan,
    orthonormalise,
)
from trainer.model import ModelConfig, Transformer, build_model, preset
from trainer.outer.diloco.flat import FlatLayout, synchronised_parameters

ASKED_BYTES: Final = 8.0
ASKED_LOSS: Final = 1.01
_MEMBERS: Final = 2
_VOCAB_ROWS: Final = 32_768
_LOCAL: Final = "127.0.0.1"
_ROUNDS: Final = (("fp32", False), ("fp16", False), ("fp32", True), ("fp16", True), ("int8", True))
"""Codec, and whether the vector is factored."""
_NUM_HELD_OUT: Final = 2
_TIMEOUT_S: Final = 600.0


def bench_powersgd(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bytes, times and losses."""
    torch.set_num_threads(1)
    shapes = [list(shape) for shape in shapes_of(preset(arguments.powersgd_preset, _VOCAB_ROWS))]
    rank = arguments.powersgd_rank
    plan = low_rank_plan(tuple(map(tuple, shapes)), rank)
    report: dict[str, Any] = {"load": [load_average()], "values": plan.num_values, "rank": rank}
    report["factored_values"] = plan.num_p + plan.num_q
    if arguments.powersgd_rounds:
        report["rounds"] = _rounds(shapes, plan.num_values, rank, arguments.powersgd_rounds)
        report["hook_cpu_s"] = _hook(shapes, rank, arguments.powersgd_rounds)
    if arguments.powersgd_steps:
        report["loss"] = _losses(arguments)
    report["load"].append(load_average())
    print(as_text(report, arguments.powersgd_preset))
    return report


def shapes_of(config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The shapes of a model's parameters, without their values."""
    with torch.device("meta"):
        model = Transformer(config)
    return FlatLayout.of(synchronised_parameters(model)).shapes


def _rounds(shapes: list[list[int]], values: int, rank: int, count: int) -> dict[str, dict[str, float]]:
    """A first round of each, in which connections are made, and then those that count."""
    found = {}
    with crew("genesis", _MEMBERS) as genesis:
        for codec, factored in _ROUNDS:
            name = f"{codec}, PowerSGD" if factored else codec
            opened = genesis.all("open", name=name, host=_LOCAL, tls=False, compression=codec)
            genesis.all("meet", name=name, peers=[each["peer"] for each in opened])
            counted = []
            for number in range(count + 1):
                requests = [
                    {
                        "name": name,
                        "index": number,
                        "values": values,
                        "seed": _MEMBERS * number + member,
                        "shapes": shapes,
                        "powersgd_rank": rank if factored else 0,
                    }
                    for member in range(_MEMBERS)
                ]
                answers = genesis.each("round", requests, timeout_s=_TIMEOUT_S)
                if any(answer["members"] != _MEMBERS for answer in answers):
                    raise SystemExit(f"{name}: expected a round of {_MEMBERS}, found {answers}")
                if number:
                    counted.append(answers)
            genesis.all("close", name=name)
            found[name] = {
                "bytes": sum(answer["sent_bytes"] for answer in counted[-1]),
                "cpu_s": median(answer["round_cpu_s"] for answers in counted for answer in answers),
                "round_s": median(max(a["until_s"] - a["from_s"] for a in answers) for answers in counted),
            }
    return found


def _hook(shapes: list[list[int]], rank: int, count: int) -> float:
    """Processor seconds of a step at one member that torch's hook adds; the first steps are plain, and warm it up."""
    with ExitStack() as stack:
        gloo = stack.enter_context(crew("gloo", _MEMBERS))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        place = {"members": _MEMBERS, "store": f"file://{Path(folder) / 'rendezvous'}", "interface": "lo"}
        gloo.each("open", [{"rank": member, **place} for member in range(_MEMBERS)])
        seconds = {}
        for used in (0, rank):
            requests = [
                {"shapes": shapes, "rank": used, "seeds": [10 * member + step for step in range(3 + count)]}
                for member in range(_MEMBERS)
            ]
            answers = gloo.each("hook", requests, timeout_s=_TIMEOUT_S)
            seconds[used] = median(cpu_s for answer in answers for cpu_s in answer["steps_cpu_s"][3:])
    return seconds[rank] - seconds[0]


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A synchronous run of two members."""

    shape: ModelConfig
    num_steps: int
    seq_len: int = 64
    rows: int = 4
    lr: float = 1e-3
    seed: int = 0


def trained_loss(training: Training, rank: int) -> float:
    """Held-out loss in nats a token; ``rank`` 0: gradients are averaged as they are."""
    model = build_model(training.shape, training.seed)
    parameters = synchronised_parameters(model)
    layout = FlatLayout.of(parameters)
    plan = low_rank_plan(layout.shapes, rank) if rank else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=0.0)
    batches = [_batches(member, training) for member in range(_MEMBERS)]
    residuals = [torch.zeros(layout.num_values) for _ in range(_MEMBERS)]
    basis: Tensor | None = None
    for step in range(training.num_steps):
        gradients = []
        for batch in batches:
            optimizer.zero_grad()
            ids = next(batch)
            model(ids[:, :-1], ids[:, 1:]).backward()
            gradients.append(layout.gather({name: _gradient(parameter) for name, parameter in parameters.items()}))
        if plan is None:
            average = sum(gradients[1:], gradients[0]) / _MEMBERS
        else:
            carried = [own + residual for own, residual in zip(gradients, residuals, strict=True)]
            p = orthonormalise(plan, _mean([compress_p(plan, own, basis, step) for own in carried]))
            q = [compress_q(plan, own, p) for own in carried]
            average = decompress(plan, p, _mean(q))
            basis = plan.basis_of(_mean(q))
            residuals = [left_out(plan, own, p, its) for own, its in zip(carried, q, strict=True)]
        for name, shape, place in layout.slices():
            parameters[name].grad = average[place].view(shape)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return _held_out_loss(model, training)


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(0)


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _batches(member: int, training: Training) -> Iterator[Tensor]:
    """Endless, from a shard of the member's own."""
    ids = _ids(member)
    generator = torch.Generator().manual_seed(1000 * training.seed + member)
    while True:
        starts = torch.randint(0, len(ids) - training.seq_len - 1, (training.rows,), generator=generator)
        yield ids[starts[:, None] + torch.arange(training.seq_len + 1)]


def _held_out_loss(model: torch.nn.Module, training: Training) -> float:
    ids = torch.cat([_ids(NUM_SHARDS - number - 1) for number in range(_NUM_HELD_OUT)])
    starts = torch.arange(0, len(ids) - training.seq_len - 1, 97)[:256]
    rows = ids[starts[:, None] + torch.arange(training.seq_len + 1)]
    with torch.no_grad():
        losses = [float(model(part[:, :-1], part[:, 1:])) for part in rows.split(32)]
    return sum(losses) / len(losses)


def _ids(shard: int) -> Tensor:
    ids: Tensor = torch.load(text_store() / f"shard_{shard}.pt", mmap=True, weights_only=True)
    return ids


def _losses(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = preset(arguments.powersgd_train_preset, 1024)
    training = Training(shape=shape, num_steps=arguments.powersgd_steps)
    plain = trained_loss(training, 0)
    found: dict[str, Any] = {"preset": arguments.powersgd_train_preset, "steps": training.num_steps, "plain": plain}
    for rank in arguments.powersgd_train_ranks:
        plan = low_rank_plan(shapes_of(shape), rank)
        fewer = plan.num_values / (plan.num_p + plan.num_q)
        found[str(rank)] = {"loss": trained_loss(training, rank), "fewer": fewer}
    return found


def as_text(report: dict[str, Any], name: str) -> str:
    """The report for people."""
    fewer = report["values"] / report["factored_values"]
    lines = [
        f"PowerSGD of rank {report['rank']} on the shape of {name}, {_MEMBERS} members"
        f"   ({' to '.join(report['load'])})",
        f"  {report['values'] / 1e6:.1f} million values, {report['factored_values'] / 1e6:.1f} factored: {fewer:.2f} "
        "times fewer",
    ]
    rounds = report.get("rounds", {})
    if rounds:
        header = f"  {'':16} {'MB sent':>9} {'of fp32':>8} {'of its codec':>13} {'round s':>8} {'cpu s a member':>15}"
        lines.append(header)
    for kind, found in rounds.items():
        codec = kind.split(",")[0]
        line = f"  {kind:16} {found['bytes'] / 1e6:>9.1f} {rounds['fp32']['bytes'] / found['bytes']:>8.2f}"
        plain = rounds.get(codec, {}).get("bytes")
        line += f" {plain / found['bytes']:>13.2f}" if plain else f" {'':>13}"
        line += f" {found['round_s']:>8.2f} {found['cpu_s']:>15.2f}"
        lines.append(line + (f"   asked {ASKED_BYTES:g}" if kind == "fp32, PowerSGD" else ""))
    if rounds:
        ours = rounds["fp32, PowerSGD"]["cpu_s"]
        hook = report["hook_cpu_s"]
        lines.append(
            f"  torch's hook: {hook:.2f} s of processor time a member; ours, round and all, {ours / hook:.2f} times"
        )
    loss = report.get("loss")
    if loss:
        lines.append(f"  {loss['preset']}, {loss['steps']} steps: held-out loss {loss['plain']:.4f} without")
        for rank, found in loss.items():
            if isinstance(found, dict):
                text = f"  rank {rank}: {found['loss']:.4f}, {found['loss'] / loss['plain']:.4f} times that"
                lines.append(f"{text}, with {found['fewer']:.1f} times fewer values   asked {ASKED_LOSS:g}")
    return "\n".join(lines)
