"""What the training loop sees of synchronisation: one call after each inner step, whose result it logs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pydantic import ValidationError
from torch import Tensor

from trainer.outer.engine.collective import RoundReport

StateValue = int | float | str | Tensor | None | list["StateValue"] | dict[str, "StateValue"]
"""What a strategy's state consists of; ``torch.load(weights_only=True)`` reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterResult:
    """One attempt at an outer step, for the log and the checkpointer."""

    round_index: int
    fragment: int  # Which part of the model it was for.
    outer_step: int  # Outer steps complete afterwards.
    committed: bool
    """Whether it was applied. If not, nothing changed, and the work goes into the next round; a node that missed a
    round of the others drops its work when it adopts their state."""
    num_batches: int  # Batches this node contributed.
    waited_s: float  # How long training stood still for it.
    report: RoundReport | None = None  # None if it failed.
    contributed_steps_ago: int | None = None
    """Inner steps since the parameters of this node's contribution were read; None: it has no weight in the result."""
    error: str = ""
    part: str = ""
    """Of the model, where each part has rounds of its own (`trainer.outer.diloco.parts`)."""


@runtime_checkable
class OuterStrategy(Protocol):
    """Keeps a node's model in step with the others'."""

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Counts an inner step and synchronises when it is time; returns the outer step that ended now, if one did.

        ``num_batches`` are those that changed the parameters: 0 for a step that was skipped.
        """
        ...

    def drain(self) -> OuterResult | None:
        """Waits for the round in the background, if there is one, and applies it now."""
        ...

    def state_dict(self) -> dict[str, StateValue]:
        """Returns everything needed to go on from here, except the model's own parameters."""
        ...

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Goes on from what :meth:`state_dict` returned; the caller restores the model's parameters."""
        ...


@dataclass(slots=True)
class PendingWork:
    """Batches trained since the last committed round of a fragment or slice: a contribution's weight and progress.

    Ages are wall-clock time, because they must mean something after a restart; a clock set back counts as no age.
    """

    num_batches: int = 0
    since_s: float = 0.0  # Unix time of the oldest batch; 0 if there is none.
    num_steps: int = 0  # Inner steps that they took, those included that changed nothing.
    lag: int = 0  # Rounds over the same parameters that went by without them.

    def add(self, num_batches: int) -> None:
        """Counts an inner step and its batches."""
        if num_batches and not self.num_batches:
            self.since_s = time.time()
        self.num_batches += num_batches
        self.num_steps += 1

    def age_s(self) -> float:
        """Returns the seconds since the oldest batch."""
        return max(0.0, time.time() - self.since_s) if self.num_batches else 0.0

    def settle(self, num_batches: int, steps_since: int) -> None:
        """Takes off the batches of a committed round, whose contribution was read ``steps_since`` inner steps ago.

        The age of what is left, which is younger, counts from now.
        """
        self.num_steps = steps_since
        self.lag = 0 if num_batches else self.lag + 1
        self.num_batches = max(0, self.num_batches - num_batches)
        self.since_s = time.time() if self.num_batches else 0.0


def first_problem(error: ValidationError) -> str:
    """Returns field and message of the first problem of an invalid document, without the document's values."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])[:60]}: {first['msg']}"
