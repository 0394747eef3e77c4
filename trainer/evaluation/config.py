"""`EvalConfig`: what a node measures of its model while it trains, and how often.

With the defaults a node of 8 rows of 512 tokens a step computes 1 % more: 65,536 tokens forward, every 500 steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trainer.errors import TrainerUsageError

_MOST_PROMPTS: Final = 16
_MOST_SAMPLED: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Loss on held-out shards (those of `data.holdout`; without any there is none), and sampled text."""

    every_steps: int = 500
    """Steps between two measurements of the held-out loss; 0: none by steps."""
    after_rounds: bool = True
    """Measure after outer steps too, half a planned round apart or more: only then all nodes have the same model."""
    tokens: int = 65_536
    """Tokens that are measured, the same each time, spread evenly over sources and their held-out shards."""
    sample_every_steps: int = 0
    """Steps between two samples of text in the log; 0: none."""
    sample_prompts: tuple[str, ...] = ("",)
    """What the samples go on from, each as a new document; the empty one begins a document."""
    sample_tokens: int = 64
    """Tokens of a sample, each a forward pass of one row."""
    temperature: float = 0.8
    """Of samples: 0 takes the most probable token each time."""

    def __post_init__(self) -> None:
        """Raises TrainerUsageError, with the field and its value, if a value makes no sense."""
        for name, holds, expected in (
            ("every_steps", self.every_steps >= 0, "0 (never) or more"),
            ("tokens", self.tokens >= 1, "1 or more"),
            ("sample_every_steps", self.sample_every_steps >= 0, "0 (never) or more"),
            ("sample_prompts", 1 <= len(self.sample_prompts) <= _MOST_PROMPTS, f"1 to {_MOST_PROMPTS} texts"),
            ("sample_tokens", 1 <= self.sample_tokens <= _MOST_SAMPLED, f"1 to {_MOST_SAMPLED}"),
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number of 0 or more"),
        ):
            if not holds:
                raise TrainerUsageError(f"eval.{name}: expected {expected}, found {getattr(self, name)!r}")
