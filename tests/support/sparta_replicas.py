"""Replicas that average by SPARTA, each with an AdamW of its own, and collectives that do what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.support.toy_models import Regression
from trainer.errors import RoundFailedError, StateBehindError
from trainer.outer.engine.collective import Collective, Contribution, LocalCollective, RoundReport, RoundResult
from trainer.outer.engine.strategy import OuterResult
from trainer.outer.sparta import OtherRounds, SpartaConfig, SpartaTrainer

__all__ = ["Frontier", "Replica", "Scripted", "fail", "refuse", "same"]


def same(contribution: Contribution) -> Tensor:
    """As a node alone."""
    return contribution.vector


def fail(contribution: Contribution) -> Tensor:
    """Nobody has a result."""
    raise RoundFailedError("nobody came")


def refuse(contribution: Contribution) -> Tensor:
    """The others have gone on."""
    raise StateBehindError("the round is over")


class Scripted:
    """A collective that does what a test says, when it says so, and remembers what it was given."""

    def __init__(self, answer: Callable[[Contribution], Tensor] = same, *, completeness: float = 1.0) -> None:
        self.answer = answer
        self.completeness = completeness
        self.residual: Tensor | None = None
        self.contributions: list[Contribution] = []
        self.peers_wait = False
        self.gate = threading.Event()
        self.gate.set()

    def reduce(self, contribution: Contribution) -> RoundResult:
        self.contributions.append(contribution)
        assert self.gate.wait(30)
        vector = self.answer(contribution)
        report = RoundReport(round_index=contribution.round_index, members=("a", "b"), completeness=self.completeness)
        return RoundResult(vector=vector, report=report, residual=self.residual)

    def requested(self) -> bool:
        return self.peers_wait

    def close(self) -> None: ...


class Frontier:
    """What discovery would tell of the others' rounds."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.moved_to: list[int] = []

    def frontier(self) -> int:
        return self.at

    def move_to(self, round_index: int) -> None:
        self.moved_to.append(round_index)


class Replica:
    """A model, its AdamW and its SPARTA."""

    def __init__(
        self,
        config: SpartaConfig,
        collective: Collective | None = None,
        *,
        number: int = 0,
        model: nn.Module | None = None,
        lr: float = 0.01,
        others: OtherRounds | None = None,
        after_average: Callable[[nn.Module], None] | None = None,
        kept_axes: Mapping[str, int] | None = None,
    ) -> None:
        self.model = Regression(number) if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        options = {} if others is None else {"others": others}
        self.trainer = SpartaTrainer(
            self.model,
            config,
            LocalCollective() if collective is None else collective,
            optimizer=self.optimizer,
            after_average=after_average,
            kept_axes=kept_axes,
            **options,
        )
        self.results: list[OuterResult] = []

    def step(self, index: int) -> None:
        """One of AdamW alone."""
        self.optimizer.zero_grad()
        self.model(index).backward()
        self.optimizer.step()

    def train(self, first: int, stop: int) -> None:
        """Steps, each followed by SPARTA's turn."""
        for index in range(first, stop):
            self.step(index)
            self.turn()

    def turn(self, num_batches: int = 1) -> OuterResult | None:
        """SPARTA's turn alone: as a replica that does not step."""
        return self.keep(self.trainer.after_inner_step(num_batches))

    def drain(self) -> OuterResult | None:
        """Waits for the round in flight."""
        return self.keep(self.trainer.drain())

    def keep(self, result: OuterResult | None) -> OuterResult | None:
        if result is not None:
            self.results.append(result)
        return result

    def vector(self) -> Tensor:
        """All parameters."""
        return self.trainer.layout.gather(dict(self.model.named_parameters()))

    def moments(self) -> dict[str, Tensor]:
        """AdamW's memory, copied."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[parameter]}.{kind}": torch.as_tensor(value).clone()
            for parameter, state in self.optimizer.state.items()
            for kind, value in state.items()
        }
