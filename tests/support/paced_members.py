"""Members of a run in this process that take steps at paces of their own, with real endpoints and rounds.

A member's steps only move the parameter of its own number, by one each: what a round's result holds at that place tells
how many of its steps went into the round, and the sums tell whether any was lost, or counted twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trainer.aggregation import RuleConfig
from trainer.collective import CollectiveConfig, PeerCollective, Terms
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.outer.diloco import DiLoCoConfig, DiLoCoTrainer
from trainer.outer.engine.collective import Contribution, RoundResult
from trainer.outer.engine.strategy import OuterResult
from trainer.run.node.loop_thread import LoopThread

_WIDTH = 8
_RUN_ID = "paced"
_TERMS = Terms(architecture={}, tokenizer_lineage="0" * 64, synchronisation={})


class _Recording(PeerCollective):
    """Keeps each round's result beside what was contributed."""

    def reduce(self, contribution: Contribution) -> RoundResult:
        return self._kept(contribution, super().reduce(contribution))

    def attend(self, contribution: Contribution) -> RoundResult:
        return self._kept(contribution, super().attend(contribution))

    def _kept(self, contribution: Contribution, result: RoundResult) -> RoundResult:
        self.results: dict[int, RoundResult]
        vars(self).setdefault("results", {})[contribution.round_index] = result
        vars(self).setdefault("contributions", {})[contribution.round_index] = contribution
        return result


@dataclass
class PacedMember:
    number: int
    step_s: float
    endpoint: Endpoint
    collective: _Recording
    trainer: DiLoCoTrainer
    model: nn.Linear
    num_steps: int = 0
    num_fetched: int = 0
    others: list[PacedMember] = field(default_factory=list)
    outcomes: list[OuterResult] = field(default_factory=list)
    anchors: dict[int, str] = field(default_factory=dict)
    """By rounds committed, the digest of the state that this member held after them."""

    @property
    def peer_id(self) -> str:
        return self.endpoint.peer_id

    def step(self) -> None:
        time.sleep(self.step_s)
        with torch.no_grad():
            self.model.weight[0, self.number] -= 1.0
        self.num_steps += 1
        outcome = self.trainer.after_inner_step(1)
        if outcome is None:
            return
        self.outcomes.append(outcome)
        if outcome.committed:
            self.anchors[self.trainer.round_index] = self.trainer.state_digest()
        elif self.collective.behind:
            self._take_up_others()

    def _take_up_others(self) -> None:
        """As a node does: the newest state of another."""
        deadline_s = time.monotonic() + 5.0
        while True:
            newest = max((each.trainer.shared_state() for each in self.others), key=lambda state: state.outer_step)
            if newest.outer_step > self.trainer.outer_step or time.monotonic() > deadline_s:
                break
            time.sleep(0.02)
        if self.collective.keeps_work:
            self.num_fetched += 1
        self.trainer.adopt(newest, keep_work=self.collective.keeps_work)
        self.collective.move_to(self.trainer.round_index)

    @property
    def unshared_steps(self) -> float:
        """By its parameters: how far they are from the anchor."""
        with torch.no_grad():
            return float(self.trainer.shared_state().anchor[self.number] - self.model.weight[0, self.number])


@contextmanager
def paced_members(
    steps_s: Sequence[float],
    diloco: DiLoCoConfig | None = None,
    rule: RuleConfig | None = None,
    residual_decay: float | None = None,
    **options: Any,
) -> Iterator[list[PacedMember]]:
    """Starts members, one a pace, that know each other."""
    loop = LoopThread("paced")
    loop.start()
    times = {"stall_timeout_s": 20.0, "round_timeout_s": 100.0, "gather_timeout_s": 60.0, "invite_after_s": 60.0}
    members: list[PacedMember] = []
    known: dict[str, Peer] = {}
    try:
        for number, step_s in enumerate(steps_s):
            rpc = RpcConfig(host="127.0.0.1", public_address="127.0.0.1", tls=False, stop_grace_s=0.1, heartbeat_s=1.0)
            endpoint = Endpoint(Identity.create(), _RUN_ID, rpc)
            directory = SimpleNamespace(
                peers=lambda own=endpoint: {key: peer for key, peer in known.items() if key != own.peer_id},
                holds_most_held_state=lambda: True,
            )
            config = CollectiveConfig(**{**times, **options})
            collective = _Recording(
                endpoint,
                loop.loop,
                _RUN_ID,
                _TERMS,
                rule or RuleConfig(rule="mean", validation="off"),
                config,
                directory,
                lambda: 0,
                weighing="pace" if config.quorum else "root",
                cycle=(diloco or DiLoCoConfig()).num_fragments,
            )
            model = nn.Linear(_WIDTH, 1, bias=False)
            with torch.no_grad():
                model.weight.zero_()
            trainer = DiLoCoTrainer(
                model,
                diloco or DiLoCoConfig(inner_steps=8, outer_lr=1.0, outer_momentum=0.0),
                collective,
                residual_decay=residual_decay,
            )
            loop.run(endpoint.start(), 20.0)
            known[endpoint.peer_id] = Peer(endpoint.peer_id, endpoint.address)
            collective.move_to(0)
            members.append(PacedMember(number, step_s, endpoint, collective, trainer, model))
        for member in members:
            member.others = [each for each in members if each is not member]
        yield members
    finally:
        for member in members:
            member.collective.close()
            loop.run(member.endpoint.stop(), 20.0)
        loop.stop()


def train(members: Sequence[PacedMember], until_round: int, within_s: float = 60.0) -> None:
    """All take steps until each has seen so many rounds; raises what a member's thread raised."""
    deadline_s = time.monotonic() + within_s
    errors: list[Exception] = []

    def run(member: PacedMember) -> None:
        try:
            while min(each.trainer.round_index for each in members) < until_round and not errors:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"member {member.number} is at round {member.trainer.round_index}")
                member.step()
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s + 60.0)
    if errors:
        raise errors[0]


def steps_in_rounds(members: Sequence[PacedMember]) -> Mapping[int, float]:
    """For each member, the steps of it that all rounds' results hold together (rule mean, outer rate 1)."""
    results: dict[int, RoundResult] = {}
    for member in members:
        for round_index, result in vars(member.collective).get("results", {}).items():
            results.setdefault(round_index, result)
    numbers = {member.peer_id: member.number for member in members}
    found = dict.fromkeys(numbers.values(), 0.0)
    for result in results.values():
        total = sum(result.report.weights)
        for peer_id, weight in zip(result.report.members, result.report.weights, strict=True):
            if weight:
                found[numbers[peer_id]] += float(result.vector[numbers[peer_id]]) * total / weight
    return found
