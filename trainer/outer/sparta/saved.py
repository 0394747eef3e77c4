"""SPARTA's part of a checkpoint: counters alone, of plain values; parameters and moments are saved beside it.

A round in flight is not saved as such. Its result was not applied, so the slice as it is now is as good a contribution
as the one that was sent: whoever loads the checkpoint begins the round again with the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.errors import CheckpointMismatchError
from trainer.outer.engine.strategy import StateValue

__all__ = ["SavedProgress", "SavedSparta"]

_Count = Annotated[int, Field(ge=0, lt=2**48)]


class _Saved(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SavedProgress(_Saved):
    """Batches that wait in one slice for a committed round, and Unix time of the oldest."""

    num_batches: _Count
    since_s: Annotated[float, Field(ge=0)]


class SavedSparta(_Saved):
    """Everything of a :class:`~trainer.outer.sparta.trainer.SpartaTrainer` that is no parameter, moment or option."""

    version: Literal[1] = 1
    schedule_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    round_index: _Count
    reached: _Count
    failed_in_a_row: _Count
    failed_round: Annotated[int, Field(ge=-1, lt=2**48)]
    ghost_rounds_left: _Count
    behind: bool
    damaged: bool
    num_inner_steps: _Count
    steps_since_round: _Count
    begin_again: bool
    """A round was in flight, or due at once."""
    progress: list[SavedProgress]
    """By slice."""

    def to_dict(self) -> dict[str, StateValue]:
        """As a checkpoint holds it."""
        return self.model_dump()

    @classmethod
    def from_dict(cls, saved: Mapping[str, StateValue], schedule_digest: str, num_slices: int) -> SavedSparta:
        """What a checkpoint holds, with every value checked.

        Args:
            saved: from :meth:`to_dict`, perhaps of another process.
            schedule_digest: of the model and slices it is to be loaded for.
            num_slices: as many counters there must be.

        Raises:
            CheckpointMismatchError: another version, model or schedule, or values that are missing or of another kind.
        """
        if saved.get("version") != 1:
            raise CheckpointMismatchError(
                f"expected SPARTA state of version 1, found version {str(saved.get('version'))[:20]}"
            )
        try:
            found = cls.model_validate(dict(saved))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CheckpointMismatchError(f"the SPARTA state's {where[:60]}: {first['msg']}") from error
        if found.schedule_digest != schedule_digest or len(found.progress) != num_slices:
            raise CheckpointMismatchError(
                f"expected SPARTA state of this model and schedule ({schedule_digest[:12]}), found "
                f"{found.schedule_digest[:12]}; use the model and the sparta options the checkpoint was made with"
            )
        if found.reached > found.round_index:
            raise CheckpointMismatchError(
                f"expected the SPARTA state's round {found.round_index} to be {found.reached} or later"
            )
        return found
