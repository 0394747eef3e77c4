"""Collectives for tests: one that does what a test says, and replicas in threads that average in lockstep.

Sums of the latter are in fp64 in the order of the ranks, so the mean of a few fp32 values is the exactly rounded one.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError
from trainer.outer.engine.collective import Collective, Contribution, LocalCollective, RoundReport, RoundResult
from trainer.outer.engine.strategy import OuterResult, OuterStrategy
from trainer.outer.sparta import NOBODY, OtherRounds, SpartaConfig, SpartaTrainer

WAIT_S = 60.0
T = TypeVar("T")


def same(contribution: Contribution) -> Tensor:
    return contribution.vector


def raising(error: Exception) -> Callable[[Contribution], Tensor]:

    def answer(contribution: Contribution) -> Tensor:
        raise error

    return answer


fail = raising(RoundFailedError("nobody came"))
refuse = raising(StateBehindError("the round is over"))
leave = raising(RoundLeftError("this node is to stop"))


class Scripted:
    """A collective that answers what a test says, once ``gate`` is set, and records its contributions."""

    def __init__(self, answer: Callable[[Contribution], Tensor] = same) -> None:
        self.answer = answer
        self.residual: Tensor | None = None
        self.progress: float | None = None
        self.contributions: list[Contribution] = []
        self.threads: set[str] = set()
        self.peers_wait = False
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def reduce(self, contribution: Contribution) -> RoundResult:
        self.contributions.append(contribution)
        self.threads.add(threading.current_thread().name)
        self.started.set()
        assert self.gate.wait(WAIT_S)
        contribution.wait_until_filled()
        vector = self.answer(contribution)
        report = RoundReport(round_index=contribution.round_index, members=("a", "b"))
        return RoundResult(vector=vector, report=report, residual=self.residual, progress=self.progress)

    def requested(self) -> bool:
        return self.peers_wait

    def close(self) -> None: ...


class ReplicaGroup:
    """What replicas meet at, all of them in every round; meetings (from 0) of ``failing_rounds`` have no result."""

    def __init__(self, num_replicas: int, failing_rounds: Sequence[int] = ()) -> None:
        self._barrier = threading.Barrier(num_replicas)
        self._brought: list[Contribution | None] = [None] * num_replicas
        self._failing = frozenset(failing_rounds)
        self.history: list[list[Contribution]] = []

    def meet(self, rank: int, contribution: Contribution) -> RoundResult:
        self._brought[rank] = contribution
        if self._barrier.wait(WAIT_S) == 0:
            self.history.append([brought for brought in self._brought if brought is not None])
        self._barrier.wait(WAIT_S)
        meeting, brought = len(self.history) - 1, self.history[-1]
        if meeting in self._failing:
            raise RoundFailedError(f"meeting {meeting} was to fail")
        mean = torch.stack([other.vector.double() for other in brought]).mean(dim=0).float()
        members = tuple(f"replica-{other}" for other in range(len(brought)))
        return RoundResult(vector=mean, report=RoundReport(round_index=contribution.round_index, members=members))


class MeetingCollective:
    def __init__(self, group: ReplicaGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def reduce(self, contribution: Contribution) -> RoundResult:
        return self._group.meet(self._rank, contribution)

    def requested(self) -> bool:
        return False

    def close(self) -> None: ...


def run_replicas(replicas: Sequence[Callable[[], T]]) -> list[T]:
    """Run each in a thread of its own; the first error of any is raised."""
    with ThreadPoolExecutor(len(replicas)) as pool:
        futures = [pool.submit(replica) for replica in replicas]
        return [future.result(WAIT_S) for future in futures]


class Frontier:
    def __init__(self) -> None:
        self.at = 0
        self.moved_to: list[int] = []

    def frontier(self) -> int:
        return self.at

    def move_to(self, round_index: int) -> None:
        self.moved_to.append(round_index)


class Replica:
    def __init__(
        self,
        config: SpartaConfig,
        collective: Collective | None = None,
        *,
        number: int = 0,
        model: nn.Module | None = None,
        lr: float = 0.01,
        others: OtherRounds = NOBODY,
        after_average: Callable[[nn.Module], None] | None = None,
        kept_axes: Mapping[str, int] | None = None,
    ) -> None:
        self.model = Regression(number) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.trainer = SpartaTrainer(
            self.model,
            config,
            LocalCollective() if collective is None else collective,
            optimizer=self.optimizer,
            after_average=after_average,
            kept_axes=kept_axes,
            others=others,
        )
        self.results: list[OuterResult] = []

    def step(self, index: int) -> None:
        self.optimizer.zero_grad()
        self.model(index).backward()
        self.optimizer.step()

    def train(self, first: int, stop: int) -> None:
        for index in range(first, stop):
            self.step(index)
            self.turn()

    def turn(self, num_batches: int = 1) -> OuterResult | None:
        """SPARTA's turn alone: as a replica that does not step."""
        return self.keep(self.trainer.after_inner_step(num_batches))

    def drain(self) -> OuterResult | None:
        return self.keep(self.trainer.drain())

    def keep(self, result: OuterResult | None) -> OuterResult | None:
        if result is not None:
            self.results.append(result)
        return result

    def vector(self) -> Tensor:
        return self.trainer.layout.gather(dict(self.model.named_parameters()))

    def moments(self) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[parameter]}.{kind}": torch.as_tensor(value).clone()
            for parameter, state in self.optimizer.state.items()
            for kind, value in state.items()
        }


def to_bytes(**parts: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
    return buffer.getvalue()


def restore(saved: bytes, **parts: Any) -> None:
    contents = torch.load(io.BytesIO(saved), weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(contents[name])


class Quadratic(nn.Module):
    """0.5 · Σ a (x − c)²: the optimum of the mean over replicas is the mean of their centres (equal a)."""

    def __init__(self, replica: int, num_values: int = 16) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(100 + replica)
        self.x = nn.Parameter(torch.full((num_values,), 5.0))
        self.register_buffer("centre", torch.randn(num_values, generator=seeded))
        self.register_buffer("curvature", torch.linspace(0.2, 1.0, num_values))

    def forward(self, step: int) -> Tensor:
        return 0.5 * (self.curvature * (self.x - self.centre).square()).sum()


class Regression(nn.Module):
    """An MLP that learns a fixed other MLP; each replica draws inputs of its own."""

    def __init__(self, replica: int) -> None:
        super().__init__()
        self.replica = replica
        self.net = _mlp(seed=1)
        object.__setattr__(self, "teacher", _mlp(seed=2))

    def forward(self, step: int) -> Tensor:
        seeded = torch.Generator().manual_seed(10_000 * self.replica + step)
        return self.loss_on(torch.randn(32, 4, generator=seeded))

    def loss_on(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(inputs)
        return (self.net(inputs) - wanted).square().mean()


def _mlp(seed: int) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    seeded = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=seeded) * 0.5)
    return net


def parameter_bits(model: nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def drift(model: nn.Module, by: float) -> None:
    """Adds to the parameters, as inner steps would: ``by`` to those of the first tensor, twice that to the second, …"""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(by * (index + 1))


def rounds_of(model: nn.Module, strategy: OuterStrategy, num_steps: int, lr: float = 0.05) -> list[OuterResult]:
    """Trains by SGD, with the strategy's turn after each step; returns the rounds that ended."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    results = []
    for step in range(num_steps):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()
        result = strategy.after_inner_step()
        if result is not None:
            results.append(result)
    return results
