"""What lies of a minority cost a run, and what protection costs an honest one: held-out loss over an honest mean's.

DiLoCo as the trainer has it (inner loop, outer step, parts of a round, rule and validation, weights), on one core and
without a network: members train one after the other. Each has a shard of its own of a store of real text; the loss is
that of two other shards. Liars claim as many batches as the cap lets them. Honest members of so few tokens a step have
cosines of 0.1 to 0.5 with each other, which is where rules that look at single coordinates are weakest.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from tests.support.small_store import NUM_SHARDS, text_store
from trainer.aggregation import RuleConfig, cap_weights, decide, moments, needs_decision, needs_moments, reduce_part
from trainer.collective.planning import cut_values
from trainer.errors import NonFiniteTrainingError, RoundFailedError
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.model import ModelConfig, build_model
from trainer.outer.diloco.flat import FlatLayout, synchronised_parameters
from trainer.outer.diloco.outer import OuterOptimizer

_SHAPE: Final = ModelConfig(
    vocab_size=1024, dim=64, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=192, max_seq_len=64
)
_ROWS, _SEQ_LEN, _NUM_HELD_OUT = 4, 32, 2
_MOST_VALUES: Final = 1 << 18
_GROUPS: Final = ((4, 1), (7, 2))
_HONEST: Final = (3, 4, 8)

Lie = Callable[[Tensor, torch.Generator], Tensor]

LIES: Final[Mapping[str, Lie]] = {
    "x -10": lambda own, _: -10 * own,
    "x 1000": lambda own, _: 1000 * own,
    "NaN": lambda own, _: torch.full_like(own, torch.nan),
    "zeros": lambda own, _: torch.zeros_like(own),
    "sign flipped": lambda own, _: -own,
    "noise": lambda own, generator: _noise(own, generator),
}
"""What a liar makes of its own pseudo-gradient; noise is of the same norm."""

RULES: Final[Mapping[str, RuleConfig]] = {
    "default": RuleConfig(),
    "trimmed_mean, unvalidated": RuleConfig(validation="log"),
    "mean, validated": RuleConfig(rule="mean"),
    "mean": RuleConfig(rule="mean", validation="off"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How long a run is."""

    num_rounds: int = 10
    inner_steps: int = 20
    seed: int = 0


def bench_liars(arguments: argparse.Namespace) -> dict[str, Any]:
    """The table of rules, lies and groups."""
    torch.set_num_threads(1)
    setting = Setting(num_rounds=arguments.liar_rounds)
    wanted = {name: RULES[name] for name in arguments.liar_rules or RULES}
    sizes = {num_members for num_members, _ in _GROUPS} | set(_HONEST)
    honest = {size: trained_loss(RULES["mean"], size, setting) for size in sorted(sizes)}
    report: dict[str, Any] = {"honest_loss": honest, "cost": {}, "lies": {}}
    print("held-out loss over that of the mean of as many honest members", flush=True)
    for name, rule in wanted.items():
        if name != "mean":
            cost = {size: trained_loss(rule, size, setting) / honest[size] for size in _HONEST}
            report["cost"][name] = cost
            print(f"  {name:26} honest  " + "  ".join(f"{size}: {cost[size]:.4f}" for size in cost), flush=True)
        for num_members, num_liars in _GROUPS:
            found = {
                lie: trained_loss(rule, num_members, setting, lie, num_liars) / honest[num_members] for lie in LIES
            }
            report["lies"][f"{name}, {num_liars} of {num_members}"] = found
            line = "  ".join(f"{lie}: {ratio:.3f}" for lie, ratio in found.items())
            print(f"  {name:26} {num_liars} of {num_members}  {line}", flush=True)
    return report


def trained_loss(rule: RuleConfig, num_members: int, setting: Setting, lie: str = "", num_liars: int = 0) -> float:
    """Held-out loss of a run in nats a token; infinite, if it does not end with finite parameters."""
    model = tiny_model(setting)
    layout = FlatLayout.of(synchronised_parameters(model))
    replicas = [tiny_model(setting) for _ in range(num_members)]
    loops = [member_loop(replica, member, setting) for member, replica in enumerate(replicas)]
    anchor = layout.gather(synchronised_parameters(model))
    momentum, reference = torch.zeros_like(anchor), torch.zeros_like(anchor)
    generator = torch.Generator().manual_seed(setting.seed + 77)
    num_honest = num_members - num_liars
    weights = cap_weights([math.sqrt(setting.inner_steps)] * num_honest + [1e12] * num_liars)
    for _ in range(setting.num_rounds):
        rows = []
        for member, (replica, loop) in enumerate(zip(replicas, loops, strict=True)):
            parameters = synchronised_parameters(replica)
            layout.scatter(anchor, parameters)
            try:
                for _ in range(setting.inner_steps):
                    loop.step()
            except NonFiniteTrainingError:
                return math.inf
            own = anchor - layout.gather(parameters)
            rows.append(own if member < num_honest else LIES[lie](own, generator))
        reference = _aggregated(rows, weights, rule, reference)
        OuterOptimizer().step(anchor, momentum, reference)
    layout.scatter(anchor, synchronised_parameters(model))
    return held_out_loss(model)


def tiny_model(setting: Setting) -> torch.nn.Module:
    """Returns the model of all members, with its first weights."""
    return build_model(_SHAPE, setting.seed)


def member_loop(model: torch.nn.Module, member: int, setting: Setting) -> InnerLoop:
    """Returns the training of one member, on a shard of its own."""
    config = InnerConfig(
        lr=3e-3,
        warmup_steps=setting.inner_steps,
        decay_end_step=2 * setting.num_rounds * setting.inner_steps,
        seq_len=_SEQ_LEN,
        micro_batch_size=_ROWS,
    )
    batches = _batches(member, setting.seed)
    return InnerLoop(model, make_optimizer(model, config), config, batches, torch.device("cpu"))


def held_out_ratio(lie: str, num_members: int, num_liars: int, setting: Setting) -> float:
    """Loss under the default options with liars, over that of as many honest members under the mean."""
    honest = trained_loss(RULES["mean"], num_members, setting)
    return trained_loss(RULES["default"], num_members, setting, lie, num_liars) / honest


def _aggregated(rows: list[Tensor], weights: list[float], rule: RuleConfig, reference: Tensor) -> Tensor:
    """Part by part, as the reducers of a round do it."""
    part_values = cut_values(reference.numel(), len(rows), _MOST_VALUES)
    whole = decide(moments(rows, reference), weights, rule) if needs_moments(rule) else None
    parts = []
    for start in range(0, reference.numel(), part_values):
        cut = slice(start, start + part_values)
        copies, decision = [row[cut] for row in rows], whole
        if decision is None and needs_decision(rule):
            decision = decide(moments(copies, reference[cut]), weights, rule)
        try:
            parts.append(reduce_part(copies, weights, rule, decision, reference[cut]))
        except RoundFailedError:
            parts.append(torch.zeros_like(reference[cut]))
    return torch.cat(parts)


def _ids(shard: int) -> Tensor:
    ids: Tensor = torch.load(text_store() / f"shard_{shard}.pt", mmap=True, weights_only=True)
    return ids


def _batches(member: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Endless, from a shard of the member's own."""
    ids = _ids(member % (NUM_SHARDS - _NUM_HELD_OUT))
    generator = torch.Generator().manual_seed(1000 * seed + member)
    while True:
        starts = torch.randint(0, len(ids) - _SEQ_LEN - 1, (_ROWS,), generator=generator)
        rows = ids[starts[:, None] + torch.arange(_SEQ_LEN + 1)]
        yield {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def held_out_loss(model: torch.nn.Module) -> float:
    """Returns the loss on the shards that nobody trains on; infinite where it is not finite."""
    ids = torch.cat([_ids(NUM_SHARDS - number - 1) for number in range(_NUM_HELD_OUT)])
    starts = torch.arange(0, len(ids) - _SEQ_LEN - 1, 97)[:640]
    rows = ids[starts[:, None] + torch.arange(_SEQ_LEN + 1)]
    with torch.no_grad():
        loss = float(model(rows[:, :-1], rows[:, 1:]))
    return loss if math.isfinite(loss) else math.inf


def _noise(own: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(own.shape, generator=generator)
    return noise * (own.norm() / noise.norm())
