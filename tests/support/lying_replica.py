"""A real worker whose answers are not what it computed: it counts, steps and averages as any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.pipeline.worker import StageWorker

Change = Callable[[Tensor], Tensor]


def _noise(values: Tensor) -> Tensor:
    found = torch.randn_like(values)
    return found * (values.norm() / found.norm())


def _times(factor: float) -> Change:
    return lambda values: factor * values


@dataclass
class Lie:
    activation: Change | None = None
    gradient: Change | None = None
    is_honest_when_asked: bool = False
    """Evaluations, which count nothing, are answered as they should be."""
    honest_for: int = 0
    """Answers, evaluations included, that are sent as they are before the first lie."""
    num_sent: int = 0
    """Gradients that it has sent, evaluations' included; of a head, activations."""
    num_lies: int = 0
    """Counted micro-batches whose gradient or activation was not what it should have been."""

    def begin(self, worker: StageWorker) -> None:
        link, executor = worker.link, worker.executor
        activation, gradient, evaluate = link.activation, link.gradient, executor.answer_evaluate
        evaluating = ContextVar("evaluating", default=False)

        def changed(values: Tensor, change: Change | None) -> Tensor:
            lies = self.num_sent >= self.honest_for and not (self.is_honest_when_asked and evaluating.get())
            return values if change is None or not lies else change(values)

        def count() -> None:
            self.num_lies += self.num_sent >= self.honest_for and not evaluating.get()
            self.num_sent += 1

        async def send_activation(y: Tensor, ids: Tensor | None) -> Mapping[str, Tensor]:
            sent = changed(y, self.activation)
            if worker.replica.kind == "head":
                count()
            return await activation(sent, ids)

        async def send_gradient(values: Tensor) -> Mapping[str, Tensor]:
            sent = changed(values, self.gradient)
            count()
            return await gradient(sent)

        async def answer_evaluate(*arguments: Any) -> Any:
            token = evaluating.set(True)
            try:
                return await evaluate(*arguments)
            finally:
                evaluating.reset(token)

        vars(link).update(activation=send_activation, gradient=send_gradient)
        vars(executor).update(answer_evaluate=answer_evaluate)


LIES: dict[str, tuple[str, Callable[[], Lie]]] = {
    "-3 x gradient": ("tail", lambda: Lie(gradient=_times(-3))),
    "-3 x gradient, honest when asked": ("tail", lambda: Lie(gradient=_times(-3), is_honest_when_asked=True)),
    "-3 x gradient, after 150": ("tail", lambda: Lie(gradient=_times(-3), honest_for=150)),
    "10 x gradient": ("tail", lambda: Lie(gradient=_times(10))),
    "gradient of noise": ("body-1", lambda: Lie(gradient=_noise)),
    "gradient of zeros": ("body-1", lambda: Lie(gradient=torch.zeros_like)),
    "1,000 x activation": ("body-1", lambda: Lie(activation=_times(1000))),
    "activation of noise": ("body-1", lambda: Lie(activation=_noise)),
    "activation of noise, head": ("head", lambda: Lie(activation=_noise)),
    "2 x gradient": ("tail", lambda: Lie(gradient=_times(2))),
}
"""Stage and lie, by name."""


def lie_named(name: str) -> tuple[str, Lie]:
    stage, make = LIES[name]
    return stage, make()
