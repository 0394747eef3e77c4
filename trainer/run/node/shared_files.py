"""A member's shared state as a snapshot others can fetch, and back; every member makes the same bytes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.errors import IncompatiblePeerError
from trainer.network.transfer import Descriptor, Expectation
from trainer.network.transfer.descriptor import Meta
from trainer.outer.diloco import SharedState

__all__ = [
    "VECTORS",
    "DilocoStates",
    "SharedMeta",
    "check_meta",
    "check_vectors",
    "from_snapshot",
    "snapshot_meta",
    "snapshot_tensors",
]

_NUMBERS = ("outer_step", "fragment", "num_inner_steps", "vocab_rows")
_TOO_LARGE = 2**48
"""No run gets as far; and beyond 2**53 a node could not announce where it stands."""
VECTORS = ("anchor", "momentum", "reference")
"""Names of a snapshot's tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMeta:
    """A :class:`~trainer.outer.diloco.SharedState` without its vectors."""

    outer_step: int
    fragment: int
    num_inner_steps: int
    vocab_rows: int
    layout_digest: str


def snapshot_meta(shared: SharedState) -> dict[str, int | str]:
    """What goes into the descriptor."""
    numbers: dict[str, int | str] = {name: int(getattr(shared, name)) for name in _NUMBERS}
    return numbers | {"version": 1, "layout_digest": shared.layout_digest}


def snapshot_tensors(shared: SharedState) -> dict[str, torch.Tensor]:
    """What goes into the data."""
    return {name: getattr(shared, name) for name in VECTORS}


def check_meta(meta: Mapping[str, Any]) -> SharedMeta:
    """What a descriptor says of a shared state.

    Raises:
        IncompatiblePeerError: it is no descriptor of one.
    """
    layout_digest = meta.get("layout_digest")
    if meta.get("version") != 1 or not isinstance(layout_digest, str):
        raise IncompatiblePeerError(
            f"expected the descriptor of a shared state of version 1, found version {str(meta.get('version'))[:20]}"
        )
    for name in _NUMBERS:
        value = meta.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _TOO_LARGE:
            raise IncompatiblePeerError(
                f"the state's {name}: expected a number from 0 and under {_TOO_LARGE}, found {str(value)[:40]}"
            )
    return SharedMeta(**{name: meta[name] for name in _NUMBERS}, layout_digest=layout_digest)


def from_snapshot(meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> SharedState:
    """The state a snapshot holds.

    Raises:
        IncompatiblePeerError: it is no snapshot of a shared state.
    """
    said = check_meta(meta)
    if set(tensors) != set(VECTORS):
        raise IncompatiblePeerError(f"expected a snapshot of {', '.join(VECTORS)}, found {len(tensors)} others")
    return SharedState(
        outer_step=said.outer_step,
        fragment=said.fragment,
        num_inner_steps=said.num_inner_steps,
        vocab_rows=said.vocab_rows,
        layout_digest=said.layout_digest,
        **{name: tensors[name] for name in VECTORS},
    )


def check_vectors(descriptor: Descriptor, num_values: int, *, max_bytes: int) -> Expectation:
    """What the tensors of a state of so many values are, if the descriptor says they are that.

    Raises:
        IncompatiblePeerError: it says otherwise.
    """
    expected = dict.fromkeys(VECTORS, ("float32", (num_values,)))
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors}
    if found != expected:
        raise IncompatiblePeerError(
            f"expected a state of {', '.join(VECTORS)} with {num_values} fp32 values each, found {_told(found)}"
        )
    return Expectation(max_bytes=max_bytes, tensors=expected)


def _told(found: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    named = [f"{name[:32]!r} {dtype} {list(shape)}" for name, (dtype, shape) in found.items()]
    return ", ".join(named[: len(VECTORS)] + ["…"] * (len(named) > len(VECTORS))) or "none"


class DilocoStates:
    """DiLoCo's part of a `trainer.run.node.state_form.StateForm`; what fits, those say that know the model."""

    __slots__ = ()

    def outer_step(self, shared: SharedState) -> int:
        """How far it is, as announced."""
        return shared.outer_step

    def pack(self, shared: SharedState) -> tuple[Meta, Mapping[str, torch.Tensor]] | None:
        """As a snapshot; first weights have no vote, or two newcomers would outvote the one node that has trained."""
        if not shared.outer_step and not shared.fragment:
            return None
        return snapshot_meta(shared), snapshot_tensors(shared)

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> SharedState:
        """The state a snapshot holds.

        Raises:
            IncompatiblePeerError: it is no snapshot of one.
        """
        return from_snapshot(meta, tensors)
