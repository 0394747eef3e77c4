"""Steps of two ranks under DDP that one of them alone would take otherwise; results are plain values and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.support.small_model import batches, small_model
from trainer.inner import InnerConfig, InnerLoop, make_optimizer
from trainer.outer.engine.ddp import ddp_model

CONFIG = InnerConfig(lr=1e-2, warmup_steps=0, max_grad_norm=2.0, accumulation_steps=2)
INFINITE, EMPTY, BAD_GRADIENT = "infinite loss", "no label", "bad gradient"
STEPS: list[tuple[str, str]] = [
    ("", ""),
    ("", INFINITE),
    ("", EMPTY),
    (EMPTY, EMPTY),
    (BAD_GRADIENT, ""),
    (EMPTY, INFINITE),
    ("", ""),
]
"""What is odd about a step, at rank 0 and at rank 1."""
SKIPPED = [False, True, False, True, True, True, False]


class Odd(nn.Module):
    """A model whose loss alone is infinite where the first id is -1, and its gradient alone where it is -2."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids.clamp(min=0), labels)
        if input_ids[0, 0] == -1:
            return loss + math.inf
        if input_ids[0, 0] == -2:  # The root of nothing: value 0, slope infinite.
            return loss + (self.model.embedding.weight[0, 0] * 0.0).abs().sqrt()
        return loss


def _batches(rank: int) -> Iterator[dict[str, Tensor]]:
    plain = batches(5 + rank)
    for odd in (each[rank] for each in STEPS):
        for batch in (next(plain) for _ in range(CONFIG.accumulation_steps)):
            if odd == EMPTY:
                batch["labels"] = torch.full_like(batch["labels"], -100)
            elif odd:
                batch["input_ids"][0, 0] = {INFINITE: -1, BAD_GRADIENT: -2}[odd]
            yield batch


def odd_steps(rank: int, num_ranks: int) -> dict[str, object]:
    """All of STEPS; after each, whether it was skipped, and the parameters."""
    model = Odd()
    optimizer = make_optimizer(model, CONFIG)
    loop = InnerLoop(ddp_model(model), optimizer, CONFIG, _batches(rank), torch.device("cpu"))
    skipped, parameters = [], []
    for _ in STEPS:
        skipped.append(loop.step().skipped)
        parameters.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    return {"skipped": skipped, "parameters": parameters}
