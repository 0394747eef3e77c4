"""The learning rate as a function of the step: a line up from 0, then down to a share of the highest.

The fall ENDS AT ``decay_end_step``, counted from the beginning of the run. "Over 50,000 steps behind the warm-up" would
give 5.78e-5 at step 25,000; only the former gives 5.64e-5 (spec T-7). At step 0 the rate is 0, as there, so the
first step moves nothing but the moments. A pure function: a node that joins late or resumes needs its step alone.
"""

from __future__ import annotations

import math

from trainer.inner.config import InnerConfig

__all__ = ["lr_at"]


def lr_at(step: int, config: InnerConfig) -> float:
    """The learning rate of a step.

    Args:
        step: counted from 0.
        config: highest rate, warm-up, shape and end of the fall.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min((step - config.warmup_steps) / (config.decay_end_step - config.warmup_steps), 1.0)
    remaining = (1.0 + math.cos(math.pi * progress)) / 2.0 if config.schedule == "cosine" else 1.0 - progress
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)
