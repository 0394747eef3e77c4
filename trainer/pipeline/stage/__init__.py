"""The compute of one stage in one process: forward, backward, loss, accumulated gradients, step. It has no network.

    replica = StageReplica(stage, make_optimizer(stage, inner), inner, config, kind="body", num_stages=3)
    y = replica.forward("e0.s17.r4096", x)
    result = replica.backward("e0.s17.r4096", x, gradient_of_y, num_tokens, forward_version=replica.version)
    info = replica.step(lr_step)

Guarantees: sums over tokens accumulate and are divided by all of them in the step, so micro-batches of any length weigh
by their tokens; a micro-batch is counted whole or not at all (its gradient is computed apart and checked first); S
stages composed by hand give the loss and the gradients of the whole model (bit-identical in fp32 on a CPU). Computing
apart costs one pass over the gradient, 0.1 ms a million parameters, and one gradient's memory: in all 0 to 3 % over a
plain autograd loop with `tiny` in three stages and 1,024 tokens, up to 6 % with 128.

All methods that compute belong to one thread. Counters and results may be read from any thread.
"""

from __future__ import annotations

from trainer.pipeline.stage.config import StageConfig
from trainer.pipeline.stage.interface import (
    Accumulated,
    BackwardResult,
    LossSum,
    StageKind,
    StageShape,
    StepInfo,
    TailResult,
)
from trainer.pipeline.stage.replica import StageReplica

__all__ = [
    "Accumulated",
    "BackwardResult",
    "LossSum",
    "StageConfig",
    "StageKind",
    "StageReplica",
    "StageShape",
    "StepInfo",
    "TailResult",
]
