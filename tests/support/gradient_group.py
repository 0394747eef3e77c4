"""Replicas that average gradients in one process: what they meet at, and what they add up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.replica_group import WAIT_S, run_replicas
from trainer.errors import RoundFailedError
from trainer.inner import InnerConfig, lr_at, make_optimizer
from trainer.outer.diloco import FlatLayout, synchronised_parameters
from trainer.outer.engine.collective import Contribution, RoundReport, RoundResult
from trainer.outer.grad import GradConfig, GradientSum, GradOutcome, GradTrainer, Progress

INNER = InnerConfig(lr=1e-2, schedule="constant", warmup_steps=0)
Change = Callable[[Tensor], Tensor]


class WeighedGroup:
    """What replicas meet at, all of them in every round: a mean weighed by claims, in fp64, in the order of ranks.

    Meetings (from 0) of ``failing`` have no result. As the engine does, it waits until vectors are filled.
    """

    def __init__(self, num_replicas: int, failing: Sequence[int] = ()) -> None:
        self.num_replicas = num_replicas
        self.history: list[list[Contribution]] = []
        self._failing = frozenset(failing)
        self._lock = threading.Condition()
        self._here: dict[int, Contribution] = {}

    def meet(self, rank: int, contribution: Contribution) -> RoundResult:
        contribution.wait_until_filled()
        with self._lock:
            meeting = len(self.history)
            self._here[rank] = contribution
            if len(self._here) == self.num_replicas:
                self.history.append([self._here[each] for each in sorted(self._here)])
                self._here = {}
                self._lock.notify_all()
            assert self._lock.wait_for(lambda: len(self.history) > meeting, WAIT_S)
            brought = self.history[meeting]
        if meeting in self._failing:
            raise RoundFailedError(f"meeting {meeting} was to fail")
        assert len({(it.round_index, it.state_digest) for it in brought}) == 1, "one round, one state"
        weights = [float(it.num_batches) for it in brought]
        shares = weights if any(weights) else [1.0] * len(weights)
        summed = sum(share * it.vector.double() for share, it in zip(shares, brought, strict=True))
        assert isinstance(summed, Tensor)
        report = RoundReport(
            round_index=contribution.round_index,
            members=tuple(f"replica-{each}" for each in range(len(brought))),
            weights=tuple(weights),
        )
        return RoundResult(vector=(summed / sum(shares)).float(), report=report)


class GroupCollective:
    """One replica's; ``others_wait`` is what it answers to whether it is waited for."""

    def __init__(self, group: WeighedGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self.others_wait = False

    def reduce(self, contribution: Contribution) -> RoundResult:
        return self._group.meet(self._rank, contribution)

    def requested(self) -> bool:
        return self.others_wait

    def close(self) -> None: ...


class Sums:
    """A source of gradients; counts of an item that is taken and given back are kept."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = synchronised_parameters(model)
        self.num_tokens = self.num_micro_batches = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, loss_sum: Tensor, num_tokens: int) -> None:
        """Of the losses of so many tokens."""
        gradients = torch.autograd.grad(loss_sum, list(self._parameters.values()))
        for name, gradient in zip(self._parameters, gradients, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + gradient
        self.num_tokens += num_tokens
        self.num_micro_batches += 1

    def take_gradient(self, layout: FlatLayout) -> GradientSum:
        zeros = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}
        taken = GradientSum(layout.gather({**zeros, **self._sums}), self.num_tokens, self.num_micro_batches)
        self._sums, self.num_tokens, self.num_micro_batches = {}, 0, 0
        return taken

    def give_back(self, layout: FlatLayout, gradient: GradientSum) -> None:
        for name, shape, place in layout.slices():
            self._sums[name] = self._sums.get(name, 0.0) + gradient.vector[place].view(shape)
        self.num_tokens += gradient.num_tokens
        self.num_micro_batches += gradient.num_micro_batches


@dataclass
class Clock:
    """Time that a test moves."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class GradReplica:
    """One of a group, of a model that maps the number of a batch of 32 tokens to a mean loss (`Regression`)."""

    model: nn.Module
    collective: Any
    config: GradConfig = field(default_factory=lambda: GradConfig(ahead_s=0.0, average_state_every=0, num_slices=2))
    inner: InnerConfig = INNER
    target_tokens: int = 64
    max_norm: float = 1.0
    auto_step_s: float = 1e9
    powersgd_rank: int = 0
    clock: Clock = field(default_factory=Clock)
    outcomes: list[GradOutcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sums = Sums(self.model)
        self.trainer = GradTrainer(
            self.model,
            self.config,
            self.collective,
            optimizer=make_optimizer(self.model, self.inner),
            lr_of=lambda num_steps, num_tokens: lr_at(num_steps, self.inner, num_tokens),
            source=self.sums,
            max_norm=self.max_norm,
            target_tokens=self.target_tokens,
            auto_step_s=self.auto_step_s,
            powersgd_rank=self.powersgd_rank,
            clock=self.clock,
        )
        self.trainer.progress = self._progress
        self.known_tokens: int | None = None  # Of all, where a test says so.

    def _progress(self) -> Progress:
        own = self.sums.num_tokens
        return Progress(own, own if self.known_tokens is None else self.known_tokens)

    def count(self, *batches: int, tokens: int = 32) -> None:
        for batch in batches:
            self.sums.add(self.model(batch) * tokens, tokens)

    def look(self) -> GradOutcome | None:
        outcome = self.trainer.look()
        if outcome is not None:
            self.outcomes.append(outcome)
        return outcome

    def bits(self) -> bytes:
        state = self.trainer.shared_state()
        tensors = [*self.model.parameters(), *state.tensors().values()]
        return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors) + state.lineage.encode()


def look_all(replicas: Sequence[GradReplica]) -> list[GradOutcome | None]:
    """All look at once, each in a thread of its own, knowing how much all have."""
    total = sum(replica.sums.num_tokens for replica in replicas)
    for replica in replicas:
        replica.known_tokens = total
    return run_replicas([replica.look for replica in replicas])


def look_until_step(replicas: Sequence[GradReplica]) -> list[GradOutcome]:
    """Each in a thread of its own looks, knowing how much all have, until a round of gradients has ended for it."""
    total = sum(replica.sums.num_tokens for replica in replicas)

    def go(replica: GradReplica) -> GradOutcome:
        ends_s = time.monotonic() + WAIT_S
        while (outcome := replica.look()) is None or outcome.is_slice:
            assert time.monotonic() < ends_s, replica.outcomes
            time.sleep(0.001)
        return outcome

    for replica in replicas:
        replica.known_tokens = total
    found = run_replicas([partial(go, replica) for replica in replicas])
    for replica in replicas:
        replica.known_tokens = 0
    return found
