"""DiLoCo's part of a checkpoint: plain values and tensors, so that ``torch.load(weights_only=True)`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.errors import CheckpointMismatchError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.diloco.fragments import FragmentPlan
from trainer.outer.diloco.state import FragmentState, ReplicaState
from trainer.outer.engine.strategy import PendingWork, StateValue, first_problem

__all__ = ["SavedDiLoCo", "SavedRound"]

_VERSION = 1
_Count = Annotated[int, Field(ge=0)]


class _Saved(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


class SavedRound(_Saved):
    """A round that was under way, with what is needed to begin it again."""

    vector: Tensor
    """[P] fp32, the contribution."""
    num_batches: _Count
    """Batches in it."""
    age_s: float
    """Their age when it was made."""
    steps_left: _Count
    """Inner steps until its result is merged."""
    progress: float = 1.0
    """Share of the round's planned work that is in it; older checkpoints do not have it."""


class _SavedFragment(_Saved):
    anchor: Tensor
    momentum: Tensor
    reference: Tensor
    residual: Tensor | None = None
    num_batches: _Count
    since_s: float
    num_steps: _Count | None = None
    """Older checkpoints do not have it: the steps since the last round."""


class SavedDiLoCo(_Saved):
    """Everything of a :class:`~trainer.outer.diloco.trainer.DiLoCoTrainer` that is not a parameter or an option."""

    version: Literal[1] = 1
    layout_digest: str
    round_index: _Count
    outer_step: int = 0
    """For readers of the checkpoint; follows from ``round_index``."""
    num_inner_steps: _Count
    vocab_rows: _Count
    inner_step: _Count
    """Inner steps since the last round was tried."""
    fragments: list[_SavedFragment]
    flight: SavedRound | None = None

    @classmethod
    def of(
        cls,
        state: ReplicaState,
        layout_digest: str,
        steps_since_round: int,
        pending: list[PendingWork],
        saved_round: SavedRound | None,
    ) -> SavedDiLoCo:
        """Collects what a checkpoint holds; tensors are not copied."""
        return cls(
            layout_digest=layout_digest,
            round_index=state.round_index,
            outer_step=state.outer_step,
            num_inner_steps=state.num_inner_steps,
            vocab_rows=state.vocab_rows,
            inner_step=steps_since_round,
            fragments=[
                _SavedFragment(
                    anchor=fragment.anchor,
                    momentum=fragment.momentum,
                    reference=fragment.reference,
                    residual=fragment.residual,
                    num_batches=work.num_batches,
                    since_s=work.since_s,
                    num_steps=work.num_steps,
                )
                for fragment, work in zip(state.fragments, pending, strict=True)
            ],
            flight=saved_round,
        )

    def to_dict(self) -> dict[str, StateValue]:
        """Returns the values of a checkpoint; tensors are not copied."""
        flight = None if self.flight is None else dict(self.flight)
        return {**dict(self), "fragments": [dict(fragment) for fragment in self.fragments], "flight": flight}

    @classmethod
    def from_dict(cls, saved: Mapping[str, StateValue], plan: FragmentPlan) -> SavedDiLoCo:
        """Checks every value of a checkpoint, and copies the tensors.

        Args:
            saved: from :meth:`to_dict`, possibly of another process.
            plan: of the model it is to be loaded for.

        Raises:
            CheckpointMismatchError: another version, another model, or values that are missing or of another kind.
        """
        if saved.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"expected DiLoCo state of version {_VERSION}, found version {str(saved.get('version'))[:20]}"
            )
        try:
            found = cls.model_validate(dict(saved))
        except ValidationError as error:
            raise CheckpointMismatchError(f"expected a DiLoCo state, found another: {first_problem(error)}") from error
        if found.layout_digest != plan.digest():
            raise CheckpointMismatchError(
                f"expected DiLoCo state of this model (layout {plan.digest()[:12]}), found {found.layout_digest[:12]}; "
                "use the preset, vocabulary and diloco.num_fragments the checkpoint was made with"
            )
        if len(found.fragments) != len(plan.layouts):
            raise CheckpointMismatchError(f"expected {len(plan.layouts)} fragments, found {len(found.fragments)}")
        flight = found.flight
        if flight is not None:
            layout = plan.layouts[found.round_index % len(plan.layouts)]
            progress = min(1.0, max(0.0, flight.progress))
            flight = flight.model_copy(update={"vector": _copied(flight.vector, layout), "progress": progress})
        fragments = [
            fragment.model_copy(
                update={
                    "anchor": _copied(fragment.anchor, layout),
                    "momentum": _copied(fragment.momentum, layout),
                    "reference": _copied(fragment.reference, layout),
                    "residual": None if fragment.residual is None else _copied(fragment.residual, layout),
                }
            )
            for fragment, layout in zip(found.fragments, plan.layouts, strict=True)
        ]
        return found.model_copy(update={"flight": flight, "fragments": fragments})

    def state(self) -> ReplicaState:
        """Returns the state that was saved."""
        return ReplicaState(
            round_index=self.round_index,
            num_inner_steps=self.num_inner_steps,
            vocab_rows=self.vocab_rows,
            fragments=tuple(FragmentState(it.anchor, it.momentum, it.reference, it.residual) for it in self.fragments),
        )

    def pending(self) -> list[PendingWork]:
        """Returns the work of each fragment that waits for a round."""
        return [
            PendingWork(it.num_batches, it.since_s, self.inner_step if it.num_steps is None else it.num_steps)
            for it in self.fragments
        ]


def _copied(vector: Tensor, layout: FlatLayout) -> Tensor:
    """A copy, so that later changes to the checkpoint's tensors have no effect here."""
    if vector.shape != (layout.num_values,) or vector.dtype != torch.float32:
        raise CheckpointMismatchError(
            f"expected [{layout.num_values}] fp32 in the DiLoCo state, found {list(vector.shape)} {vector.dtype}"
        )
    return vector.detach().to("cpu", copy=True)
