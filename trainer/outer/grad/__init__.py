"""Averaged gradients (spec P-36, P-37): replicas add up gradients, and take one step together, the same at all of them.

    trainer = GradTrainer(model, GradConfig(), collective, optimizer=adamw, lr_of=schedule, source=replica, …)
    outcome = trainer.look()       # between two micro-batches

After each round all members have the same bits, moments included. Codecs (fp32, fp16, int8 with error feedback) are the
collective's; with ``powersgd_rank`` matrices travel as two thin factors, by `trainer.outer.engine.powersgd`.
"""

from __future__ import annotations

from trainer.outer.grad.averaging import GradientSource, GradientSum, Packing
from trainer.outer.grad.config import GradConfig
from trainer.outer.grad.state import GradFit, GradState
from trainer.outer.grad.timing import Progress
from trainer.outer.grad.trainer import GradOutcome, GradStep, GradTrainer

__all__ = [
    "GradConfig",
    "GradFit",
    "GradOutcome",
    "GradState",
    "GradStep",
    "GradTrainer",
    "GradientSource",
    "GradientSum",
    "Packing",
    "Progress",
]
