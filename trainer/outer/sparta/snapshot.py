"""A replica's state as a snapshot others can fetch (trainer/network/transfer), and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.errors import IncompatiblePeerError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.sparta.state import SpartaState

__all__ = ["SpartaMeta", "check_meta", "from_snapshot", "snapshot_meta", "snapshot_shapes", "snapshot_tensors"]

_VECTORS = ("parameters", "exp_avg", "exp_avg_sq")
_STEPS = "steps"
_Count = Annotated[int, Field(ge=0, lt=2**48)]
"""No run gets as far; and beyond 2**53 a node could not announce where it stands."""


class SpartaMeta(BaseModel):
    """A :class:`~trainer.outer.sparta.state.SpartaState` without its tensors: what its descriptor says."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["sparta"] = "sparta"
    version: Literal[1] = 1
    round_index: _Count
    num_inner_steps: _Count
    vocab_rows: _Count
    layout_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def snapshot_meta(shared: SpartaState) -> dict[str, int | str]:
    """What goes into the descriptor."""
    meta = SpartaMeta(
        round_index=shared.round_index,
        num_inner_steps=shared.num_inner_steps,
        vocab_rows=shared.vocab_rows,
        layout_digest=shared.layout_digest,
    )
    return meta.model_dump()


def snapshot_tensors(shared: SpartaState) -> dict[str, Tensor]:
    """What goes into the data."""
    return {name: getattr(shared, name) for name in (*_VECTORS, _STEPS)}


def snapshot_shapes(layout: FlatLayout) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a state of this layout."""
    vectors = dict.fromkeys(_VECTORS, ("float32", (layout.num_values,)))
    return {**vectors, _STEPS: ("float32", (len(layout.names),))}


def check_meta(meta: Mapping[str, Any]) -> SpartaMeta:
    """What a descriptor says of a state.

    Raises:
        IncompatiblePeerError: it is no descriptor of one.
    """
    try:
        return SpartaMeta.model_validate(dict(meta))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise IncompatiblePeerError(
            f"expected the descriptor of a SPARTA state of version 1, found one whose {where[:40]} does not fit: "
            f"{first['msg']}"
        ) from error


def from_snapshot(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SpartaState:
    """The state a snapshot holds; `SpartaState.check` says whether it fits a model.

    Raises:
        IncompatiblePeerError: it is no snapshot of one.
    """
    said = check_meta(meta)
    if set(tensors) != {*_VECTORS, _STEPS}:
        raise IncompatiblePeerError(f"expected a snapshot of {', '.join(_VECTORS)} and {_STEPS}, found others")
    return SpartaState(
        round_index=said.round_index,
        num_inner_steps=said.num_inner_steps,
        vocab_rows=said.vocab_rows,
        layout_digest=said.layout_digest,
        parameters=tensors["parameters"],
        exp_avg=tensors["exp_avg"],
        exp_avg_sq=tensors["exp_avg_sq"],
        steps=tensors[_STEPS],
    )
