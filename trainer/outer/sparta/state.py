"""The state of a SPARTA replica: what it hands to a joiner, and its part of a checkpoint.

Replicas differ a little, so a joiner takes one replica's state (parameters, AdamW's moments, counters) and becomes its
twin. It costs 12 bytes a parameter to make, since parameters go on changing meanwhile.

A checkpoint has the counters here, as plain values; parameters and moments are saved beside it. A round in flight is
not saved: its result was not applied, so whoever loads the checkpoint begins the round again with the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.errors import CheckpointMismatchError, IncompatiblePeerError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.engine.strategy import StateValue
from trainer.outer.sparta.moments import AdamMoments

__all__ = ["SavedProgress", "SavedSparta", "SpartaState"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpartaState:
    """One replica's state; tensors are on the CPU, and never changed."""

    round_index: int
    """The round that is next."""
    num_inner_steps: int
    """Optimizer steps behind it: where the schedule of a joiner begins."""
    vocab_rows: int
    """Rows of embedding and output; 0 for a stage with neither."""
    layout_digest: str
    """Which value is whose, :meth:`FlatLayout.digest`."""
    parameters: Tensor
    """[P] fp32."""
    exp_avg: Tensor
    """[P] fp32, AdamW's first moments."""
    exp_avg_sq: Tensor
    """[P] fp32, AdamW's second moments; 0 or more."""
    steps: Tensor
    """[T] fp32, AdamW's steps of each tensor of the layout, whole numbers."""

    @property
    def moments(self) -> AdamMoments:
        """AdamW's memory."""
        return AdamMoments(self.exp_avg, self.exp_avg_sq, self.steps)

    def check(self, layout: FlatLayout, *, vocab_rows: int) -> None:
        """Refuse what is no state of a model of this layout.

        Args:
            layout: of the parameters.
            vocab_rows: of the model.

        Raises:
            IncompatiblePeerError: the message names the first thing that does not fit.
        """
        layout.require_same(self.layout_digest, "the state to adopt")
        if self.round_index < 0 or self.num_inner_steps < 0 or self.vocab_rows != vocab_rows:
            raise IncompatiblePeerError(
                f"expected round and step 0 or later and {vocab_rows} rows of vocabulary in the state to adopt, found "
                f"round {self.round_index}, step {self.num_inner_steps} and {self.vocab_rows} rows"
            )
        for name in ("parameters", "exp_avg", "exp_avg_sq"):
            _check(getattr(self, name), layout.num_values, name)
        _check(self.steps, len(layout.names), "steps")
        if bool((self.exp_avg_sq < 0).any()):
            raise IncompatiblePeerError(
                "expected second moments of 0 or more in the state to adopt, found negative ones"
            )
        if bool((self.steps < 0).any()) or not torch.equal(self.steps, self.steps.round()):
            raise IncompatiblePeerError("expected whole numbers as steps of the state to adopt, found others")


def _check(tensor: Tensor, num_values: int, name: str) -> None:
    fits = tensor.shape == (num_values,) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    if not fits or not bool(torch.isfinite(tensor).all()):
        raise IncompatiblePeerError(
            f"expected {num_values} finite fp32 values on the CPU as {name} of the state to adopt, "
            f"found {list(tensor.shape)} {tensor.dtype}{' with values that are not finite' if fits else ''}"
        )


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
