"""What the training loop sees of synchronisation: one call after each inner step.

The loop does not know whether nodes synchronise every step (DDP), every 500 (DiLoCo) or never; it hands over control
after each inner step and logs what comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from trainer.outer.engine.collective import RoundReport

__all__ = ["OuterResult", "OuterStrategy", "StateValue"]

StateValue = int | float | str | Tensor | None | list["StateValue"] | dict[str, "StateValue"]
"""What a strategy's state is made of; ``torch.load(weights_only=True)`` reads it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterResult:
    """One attempt at an outer step, for the log and the checkpointer."""

    round_index: int
    """The round that was tried."""
    fragment: int
    """Which part of the model it was for."""
    outer_step: int
    """Outer steps complete afterwards."""
    committed: bool
    """Whether it was applied; if not, nothing changed, and the work goes into the next round; of a node that missed
    a round the others made, it is dropped when their state is taken up."""
    num_batches: int
    """Batches this node contributed."""
    waited_s: float
    """How long training stood still for it."""
    report: RoundReport | None = None
    """How the round went; None if it failed."""
    contributed_steps_ago: int | None = None
    """Inner steps counted since the parameters were read that this node's contribution is made of; None: it has no
    weight in what was applied."""
    error: str = ""
    """Why it failed."""


@runtime_checkable
class OuterStrategy(Protocol):
    """Keeps a node's model in step with the others'."""

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        """Count an inner step; synchronise when it is time.

        Args:
            num_batches: batches that changed the parameters: 0 for a step that was skipped.

        Returns:
            The outer step that ended now, if one did.
        """
        ...

    def drain(self) -> OuterResult | None:
        """Wait for a round that runs in the background, if there is one, and apply it now."""
        ...

    def state_dict(self) -> dict[str, StateValue]:
        """Everything needed to go on from here, without the model's own parameters."""
        ...

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on from what :meth:`state_dict` returned; the model's parameters are the caller's to restore."""
        ...
