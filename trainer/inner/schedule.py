"""The learning rate of a step, and the count of steps and tokens it goes by.

A schedule rises in a line to ``lr``, then falls or stays: it is a function of how far the run is (spec T-7), in steps
or, with ``decay_end_tokens``, in tokens, so that batches of another size leave its length in tokens as it is. ``wsd``
(warm-up, stable, decay) stays at ``lr`` and falls in a line over the last part; up to there the rate does not depend on
where the run ends, so a finished plan is made longer by raising the end before the fall begins.

A node that was away for long has AdamW's moments of weights it no longer holds, and a newcomer none: the averages of
the latest 20 steps (betas 0.9 and 0.95) tell it how far to go. After it has taken up the others' state its rate
therefore rises in a line again, as a factor on the schedule, over ``rewarm_steps``. The price is some 50 steps' worth
of learning at one node of many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from trainer.inner.config import InnerConfig


def lr_at(step: int, config: InnerConfig, num_tokens: int = 0) -> float:
    """Returns the learning rate of a step, counted from 0, before which the run had trained on ``num_tokens``."""
    in_tokens = config.decay_end_tokens > 0
    place = num_tokens if in_tokens else step
    warmup = config.warmup_tokens if in_tokens else config.warmup_steps
    if place < warmup:
        return config.lr * place / warmup
    if config.schedule == "constant":
        return config.lr
    end = config.decay_end_tokens if in_tokens else config.decay_end_step
    start = end - decay_length(config) if config.schedule == "wsd" else warmup
    progress = min(max(0.0, (place - start) / (end - start)), 1.0)
    remaining = (1.0 + math.cos(math.pi * progress)) / 2.0 if config.schedule == "cosine" else 1.0 - progress
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


def decay_length(config: InnerConfig) -> int:
    """Returns the length of the fall of ``wsd``, in tokens if the schedule is in tokens, else in steps: never 0."""
    in_tokens = config.decay_end_tokens > 0
    warmup, end, length = (
        (config.warmup_tokens, config.decay_end_tokens, config.decay_tokens)
        if in_tokens
        else (config.warmup_steps, config.decay_end_step, config.decay_steps)
    )
    return length or max(1, (end - warmup) // 5)


@dataclass(slots=True)
class ScheduleClock:
    """How far a run is: steps taken, tokens they read, and the step at which a second warm-up began, if one did.

    ``num_parts`` is how many ranks read as many rows as the configuration names and count as one (DDP over a cluster).
    """

    config: InnerConfig
    step_index: int = 0
    num_tokens: int = 0
    rewarm_from: int | None = None
    num_parts: int = 1

    @property
    def lr(self) -> float:
        """The learning rate of the step to come."""
        lr = lr_at(self.step_index, self.config, self.num_tokens)
        if not self._is_rewarming:
            return lr
        return lr * (self.step_index - (self.rewarm_from or 0) + 1) / self.config.rewarm_steps

    def count(self, num_tokens: int) -> None:
        """Counts a step over so many tokens, one that was dropped too."""
        self.step_index += 1
        self.num_tokens += num_tokens
        if not self._is_rewarming:
            self.rewarm_from = None

    def move_to(self, global_step: int) -> None:
        """Goes to where the others are; the tokens of the steps between are counted as if they had been this node's.

        A move over ``rewarm_after_steps`` or more begins a second warm-up, one within a second warm-up begins it anew.
        """
        missed = global_step - self.step_index
        is_long = missed >= self.config.rewarm_after_steps or self._is_rewarming
        self.num_tokens = max(0, self.num_tokens + missed * self.num_parts * self.config.tokens_per_step)
        self.step_index = global_step
        self.rewarm_from = global_step if is_long and missed > 0 and self.config.rewarm_steps else None

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts, by the names they have in the loop's state."""
        return {"step_index": self.step_index, "num_tokens": self.num_tokens, "rewarm_from": self.rewarm_from}

    @classmethod
    def of(cls, config: InnerConfig, state: Mapping[str, Any], num_parts: int = 1) -> Self:
        """Returns a clock of a saved loop; of one that an earlier release saved, which counted no tokens, by its steps.

        Raises KeyError, TypeError or ValueError if it is no such state.
        """
        step_index = int(state["step_index"])
        num_tokens = int(state.get("num_tokens", step_index * num_parts * config.tokens_per_step))
        rewarm_from = state.get("rewarm_from")
        return cls(config, step_index, num_tokens, None if rewarm_from is None else int(rewarm_from), num_parts)

    @property
    def _is_rewarming(self) -> bool:
        return self.rewarm_from is not None and self.step_index < self.rewarm_from + self.config.rewarm_steps
