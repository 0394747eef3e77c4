"""Replicas that average by SPARTA, each with an AdamW of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.support.toy_models import Regression
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.outer.engine.strategy import OuterResult
from trainer.outer.sparta import OtherRounds, SpartaConfig, SpartaTrainer

__all__ = ["Frontier", "Replica"]


class Frontier:
    """The others' rounds, as discovery would report them."""

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
