"""Rounds of up to 1,000 nodes and more in groups, simulated with churn: traffic, seconds, and whether all end alike.

The clock and the links are simulated; plans, tallies and arithmetic are the product's own, on a small vector: each
slice is reduced by `GroupArithmetic` and `ColumnArithmetic`, and every survivor puts its result together from
the encoded slices that it would fetch, and hashes it. Bytes are counted where they are handed over, and scaled from the
small vector to the model's by the same functions that cut both.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.aggregation import RuleConfig
from trainer.aggregation.deciding import trim_count
from trainer.collective.levels.group_plan import (
    GroupPlan,
    column_rule,
    guaranteed_liars,
    survivors_in,
    survivors_mask,
)
from trainer.collective.levels.level_arithmetic import (
    ColumnArithmetic,
    GroupArithmetic,
    part_digest,
    slice_digest,
)
from trainer.collective.levels.messages import GROUPED_PART_VALUES, LevelAgreement, Stage
from trainer.collective.levels.tally import table_of
from trainer.collective.messages import Member
from trainer.collective.planning import cut_values, first_plan, next_plan
from trainer.compression.vectors import codec_named

DOWN_MBIT, UP_MBIT = 500.0, 110.0
_RULE = RuleConfig(rule="trimmed_mean", trim_fraction=0.3, validation="off")
_MODEL_VALUES = 125_000_000
_ROSTER_ENTRY_BYTES = 850
_CALL_BYTES = 900  # A signed call and its answer, without payload.
_ROUND_TRIP_S = 0.1
_STALL_S = 10.0
_WITNESSES, _DIGEST_BYTES = 3, 32
_STATE = "ab" * 32


@dataclass(slots=True)
class Traffic:
    """Bytes by node."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    def move(self, sender: str, receiver: str, num_bytes: float) -> None:
        """Counts a transfer; none within a node."""
        if sender != receiver:
            self.sent[sender] += int(num_bytes)
            self.received[receiver] += int(num_bytes)

    def slowest_s(self) -> float:
        """Seconds that the busiest link takes."""
        up = max(self.sent.values(), default=0) * 8e-6 / UP_MBIT
        return max(up, max(self.received.values(), default=0) * 8e-6 / DOWN_MBIT)


@dataclass(slots=True)
class SimulatedRound:
    """One round of ``num_nodes``, of whom a share dies, each at a random step."""

    num_nodes: int
    death_share: float
    seed: int
    num_values: int = 32_768
    num_alike: int = 0
    num_ended: int = 0
    num_digests: int = 0
    error: float = 0.0
    seconds: float = 0.0
    traffic: list[Traffic] = field(default_factory=list)

    def run(self) -> SimulatedRound:
        """Goes through the steps of `trainer.collective.levels.grouped_round`."""
        chance = random.Random(self.seed)
        ids = [hashlib.sha256(f"{self.seed} {number}".encode()).hexdigest() for number in range(self.num_nodes)]
        plan = GroupPlan.of("bench", self.seed, _STATE, ids)
        dies = {peer_id: chance.randrange(3) for peer_id in ids if chance.random() < self.death_share}
        vectors = {
            peer_id: torch.randn(self.num_values, generator=torch.Generator().manual_seed(number))
            for number, peer_id in enumerate(ids)
        }
        scale = _MODEL_VALUES / self.num_values
        held, survivors = self._groups(plan, vectors, dies, scale)
        slices, speakers = self._columns(plan, held, survivors, dies, scale)
        self._fetch(plan, slices, speakers, [peer_id for peer_id in ids if peer_id not in dies], scale)
        self.error = self._error(plan, slices, [vectors[each] for left in survivors.values() for each in left])
        coordination = Traffic()
        for group in range(len(plan.groups)):
            self._coordination(plan, group, coordination)
        self.traffic.append(coordination)
        lost = len({step for step in dies.values() if step < 2})  # Each step at which somebody dies waits once.
        self.seconds = sum(each.slowest_s() for each in self.traffic) + lost * _STALL_S + 12 * _ROUND_TRIP_S
        return self

    def _agreement(
        self, members: Sequence[str], reducers: Sequence[str], num_values: int, weight: float
    ) -> LevelAgreement:
        return LevelAgreement(
            round_index=self.seed,
            attempt=0,
            coordinator=reducers[0],
            state_digest=_STATE,
            num_values=num_values,
            part_values=self.part_values,
            vocabulary_rows=0,
            members=tuple(
                Member(peer_id=peer_id, address="node:1", certificate=None, weight=weight)
                for peer_id in sorted(members)
            ),
            follows=_STATE,
            slice_reducers=tuple(reducers),
        )

    @property
    def part_values(self) -> int:
        """Values of a part of the small vector."""
        return cut_values(self.num_values, self.num_nodes, GROUPED_PART_VALUES)

    def _groups(
        self, plan: GroupPlan, vectors: dict[str, torch.Tensor], dies: dict[str, int], scale: float
    ) -> tuple[list[dict[int, tuple[str, bytes]]], dict[int, tuple[str, ...]]]:
        """What the groups hold, as (reducer, fp32) by part, and who is left of each by its majority's word."""
        codec, fp32 = codec_named("int8"), codec_named("fp32")
        traffic, held, words = Traffic(), [], {}
        for number, group in enumerate(plan.groups):
            agreement = self._agreement(group, group[: plan.num_slices], self.num_values, 1.0)
            arithmetic = {
                peer_id: GroupArithmetic(
                    agreement, codec, _RULE, vectors[peer_id], torch.zeros(self.num_values), result_codec=fp32
                )
                for peer_id in group
            }
            alive = [peer_id for peer_id in group if dies.get(peer_id) != 0]
            first = first_plan(agreement)
            lost = [task.key for task in first.tasks if task.reducer not in alive]
            done = next_plan(first, lost, sorted(alive), sorted(alive)) if lost else first
            kept: dict[int, tuple[str, bytes]] = {}
            for task in done.tasks:
                senders = group if task.key.startswith("0.") and not lost else alive
                for part in range(task.first_part, task.last_part):
                    payloads = {peer_id: arithmetic[peer_id].encode_own(part) for peer_id in senders}
                    for peer_id, payload in payloads.items():
                        traffic.move(peer_id, task.reducer, len(payload) * scale)
                    arithmetic[task.reducer].reduce(part, payloads)
                    kept[part] = (task.reducer, arithmetic[task.reducer].kept[part])
                    for peer_id in alive:
                        traffic.move(task.reducer, peer_id, _DIGEST_BYTES)
            held.append(kept)
            words[number] = dict.fromkeys(alive, survivors_mask(group, alive))
        table = table_of(Stage.GROUPS, words, dict(enumerate(plan.groups)))
        survivors = {group: survivors_in(plan.groups[group], mask) for group, mask in table.words().items()}
        self.traffic.append(traffic)
        return held, survivors

    def _columns(
        self,
        plan: GroupPlan,
        held: list[dict[int, tuple[str, bytes]]],
        survivors: dict[int, tuple[str, ...]],
        dies: dict[str, int],
        scale: float,
    ) -> tuple[dict[int, dict[int, bytes]], dict[int, list[str]]]:
        """The result's encoded parts by slice, and who holds each."""
        codec, fp32 = codec_named("int8"), codec_named("fp32")
        num_parts = -(-self.num_values // self.part_values)
        traffic, slices, speakers, words, voters = Traffic(), {}, {}, {}, {}
        for number in range(plan.num_slices):
            parts = plan.slice_parts(number, num_parts)
            column = plan.column(number, survivors)
            if not parts:
                continue
            start, stop = parts[0] * self.part_values, min((parts[-1] + 1) * self.part_values, self.num_values)
            alive = [peer_id for peer_id in column if dies.get(peer_id) != 1]
            agreement = self._agreement(list(column), plan.seeded_order(f"column {number}", column), stop - start, 1.0)
            arithmetic: dict[str, ColumnArithmetic] = {}
            for speaker, group in column.items():
                for part in parts:
                    reducer, payload = held[group][part]
                    traffic.move(reducer, speaker, len(payload) * scale)  # Only for one who stands in for another.
                own = torch.cat([fp32.decode(held[group][part][1], len(held[group][part][1]) // 4) for part in parts])
                expected = {
                    (other, place): part_digest(held[of][part][1])
                    for other, of in column.items()
                    for place, part in enumerate(parts)
                }
                arithmetic[speaker] = ColumnArithmetic(
                    agreement, fp32, column_rule(_RULE), own, torch.zeros(stop - start), result_codec=codec,
                    expected=expected,
                )  # fmt: skip
                traffic.received[speaker] += _WITNESSES * len(column) * (_CALL_BYTES + _DIGEST_BYTES * len(parts))
                traffic.sent[speaker] += _WITNESSES * len(column) * (_CALL_BYTES + _DIGEST_BYTES * len(parts))
            done = first_plan(agreement)
            lost = [task.key for task in done.tasks if task.reducer not in alive]
            done = next_plan(done, lost, sorted(alive), sorted(alive)) if lost else done
            results: dict[int, bytes] = {}
            for task in done.tasks:
                for part in range(task.first_part, task.last_part):
                    payloads = {peer_id: arithmetic[peer_id].encode_own(part) for peer_id in alive}
                    for peer_id, payload in payloads.items():
                        traffic.move(peer_id, task.reducer, len(payload) * scale)
                    reduced = arithmetic[task.reducer].reduce(part, payloads)
                    results[parts[0] + part] = bytes(reduced.payload)
                    for peer_id in alive:
                        traffic.move(task.reducer, peer_id, len(reduced.payload) * scale)
            slices[number], speakers[number] = results, alive
            words[number], voters[number] = dict.fromkeys(alive, slice_digest(results, parts)), list(column)
        table = table_of(Stage.SLICES, words, voters)
        if table.failure:
            raise RuntimeError(table.failure)
        self.traffic.append(traffic)
        return slices, speakers

    def _fetch(
        self,
        plan: GroupPlan,
        slices: dict[int, dict[int, bytes]],
        speakers: dict[int, list[str]],
        ending: Sequence[str],
        scale: float,
    ) -> None:
        """Puts the result together at every survivor, from the holders that it would ask."""
        codec, traffic = codec_named("int8"), Traffic()
        group_of = {peer_id: number for number, group in enumerate(plan.groups) for peer_id in group}
        digests: Counter[str] = Counter()
        for peer_id in ending:
            values = torch.empty(self.num_values)
            for number, parts in slices.items():
                if peer_id not in speakers[number]:
                    column = {holder: group_of[holder] for holder in speakers[number]}
                    holder = plan.fetch_order(peer_id, number, column)[0]
                    traffic.move(holder, peer_id, sum(len(payload) for payload in parts.values()) * scale)
                for part, payload in parts.items():
                    start = part * self.part_values
                    out = values[start : min(start + self.part_values, self.num_values)]
                    codec.decode(payload, out.numel(), out=out)
            digests[hashlib.sha256(values.numpy().tobytes()).hexdigest()] += 1
        self.traffic.append(traffic)
        self.num_ended, self.num_digests = len(ending), len(digests)
        self.num_alike = max(digests.values())

    def _coordination(self, plan: GroupPlan, group: int, traffic: Traffic) -> None:
        """The agreement through leaders, and five calls of each member to the coordinator."""
        coordinator, members = plan.groups[0][0], plan.groups[group]
        roster = _ROSTER_ENTRY_BYTES * self.num_nodes
        for leader in plan.leaders(group):
            traffic.move(coordinator, leader, roster)
        for place, peer_id in enumerate(members):
            traffic.move(plan.leaders(group)[place % 3], peer_id, roster)
            traffic.move(coordinator, peer_id, 5 * _CALL_BYTES + 100 * (len(plan.groups) + plan.num_slices))
            traffic.move(peer_id, coordinator, 5 * _CALL_BYTES)

    def _error(self, plan: GroupPlan, slices: dict[int, dict[int, bytes]], vectors: list[torch.Tensor]) -> float:
        """Distance of the result from the single group's rule over all survivors, in units of one member's norm."""
        del plan
        codec, values = codec_named("int8"), torch.empty(self.num_values)
        for parts in slices.values():
            for part, payload in parts.items():
                start = part * self.part_values
                out = values[start : min(start + self.part_values, self.num_values)]
                codec.decode(payload, out.numel(), out=out)
        rows = torch.stack(vectors).sort(0).values
        trimmed = trim_count(len(vectors), _RULE)
        whole = rows[trimmed : len(vectors) - trimmed].mean(0)
        return float((values - whole).norm() / vectors[0].norm())


def single_group(num_nodes: int) -> dict[str, float]:
    """What one group of all of them would cost: a node's traffic, and the coordinator's agreements and votes."""
    model = codec_named("int8").encoded_bytes(_MODEL_VALUES)
    node = 2 * model * (num_nodes - 1) / num_nodes
    agreements = num_nodes * num_nodes * _ROSTER_ENTRY_BYTES
    votes = num_nodes * num_nodes * 100  # A digest for each task in each vote.
    return {
        "sent_mb": node / 1e6,
        "coordinator_mb": (node + agreements + votes) / 1e6,
        "connections": num_nodes - 1,
        "seconds": (node + agreements + votes) * 8e-6 / UP_MBIT + 8 * _ROUND_TRIP_S,
    }


def bad_rounds(num_nodes: int, share: float, tries: int) -> float:
    """Share of rounds in which a share of liars, placed by the seed, gets through both levels."""
    chance = random.Random(num_nodes)
    ids = [f"{number:064x}" for number in range(num_nodes)]
    liars = set(chance.sample(ids, int(share * num_nodes)))
    bad = 0
    for seed in range(tries):
        plan = GroupPlan.of("liars", seed, _STATE, ids)
        wrong = sum(sum(peer_id in liars for peer_id in group) > trim_count(len(group), _RULE) for group in plan.groups)
        bad += wrong > trim_count(len(plan.groups), _RULE)
    return bad / tries


def bench_groups(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of several sizes with churn, beside one group of all; and which shares of liars come through."""
    rows = []
    for num_nodes in arguments.groups_nodes:
        rounds = [
            SimulatedRound(num_nodes, arguments.groups_deaths, seed).run() for seed in range(arguments.groups_seeds)
        ]
        sent = [_totals(each.traffic, "sent") for each in rounds]
        received = [_totals(each.traffic, "received") for each in rounds]
        plan = GroupPlan.of("bench", 0, _STATE, [f"{number:064x}" for number in range(num_nodes)])
        rows.append(
            {
                "nodes": num_nodes,
                "groups": len(plan.groups),
                "sent_mb": max(sum(each.values()) / len(each) for each in sent) / 1e6,
                "most_sent_mb": max(max(each.values()) for each in sent) / 1e6,
                "received_mb": max(sum(each.values()) / len(each) for each in received) / 1e6,
                "seconds": max(each.seconds for each in rounds),
                "connections": len(plan.groups[0]) + len(plan.groups) - 2,
                "alike": min(each.num_alike / each.num_ended for each in rounds),
                "ended": sum(each.num_ended for each in rounds),
                "error": max(each.error for each in rounds),
                "single": single_group(num_nodes),
                "guaranteed_liars": guaranteed_liars(num_nodes, _RULE),
                "bad_rounds": {
                    share: bad_rounds(num_nodes, share, arguments.groups_tries) for share in (0.1, 0.2, 0.25)
                },
            }
        )
    report = {"rows": rows, "deaths": arguments.groups_deaths, "seeds": arguments.groups_seeds}
    print(as_text(report))
    return report


def _totals(steps: Sequence[Traffic], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for step in steps:
        total.update(getattr(step, name))
    return total


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"rounds in groups, 125M values in int8, {DOWN_MBIT:g}/{UP_MBIT:g} Mbit/s (simulated), "
        f"{100 * report['deaths']:g} % die in each, worst of {report['seeds']} seeds; (one group of all)",
        f"{'nodes':>7} {'groups':>6} {'sent, MB':>16} {'most':>6} {'received':>9} {'seconds':>15} {'links':>12} "
        f"{'alike':>6} {'off':>6}  bears; rounds with 10, 20, 25 % liars that go wrong",
    ]
    for row in report["rows"]:
        single = row["single"]
        bad = ", ".join(f"{100 * share:.1f} %" for share in row["bad_rounds"].values())
        lines.append(
            f"{row['nodes']:>7} {row['groups']:>6} {row['sent_mb']:>7.0f} ({single['sent_mb']:.0f}) "
            f"{row['most_sent_mb']:>6.0f} {row['received_mb']:>9.0f} {row['seconds']:>6.1f} ({single['seconds']:.1f}) "
            f"{row['connections']:>5} ({single['connections']:g}) {row['alike']:>6.3f} {row['error']:>6.3f}  "
            f"{row['guaranteed_liars']}; {bad}"
        )
    return "\n".join(lines)
