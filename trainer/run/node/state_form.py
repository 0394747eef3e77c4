"""What the network side must know of the state it hands out and fetches: how it lies in a snapshot, and what fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

from trainer.network.transfer import Descriptor, Expectation
from trainer.network.transfer.descriptor import Meta

__all__ = ["StateForm"]

S = TypeVar("S")


class StateForm(Protocol[S]):
    """The form of one kind of shared state: DiLoCo's of a whole model, of a stage, or that of SPARTA's replicas."""

    def outer_step(self, shared: S) -> int:
        """How far it is, as announced."""
        ...

    def pack(self, shared: S) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """As a snapshot; None where others are not to have it."""
        ...

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """What exactly a state of this descriptor has to be.

        Raises:
            IncompatiblePeerError: this node cannot take it up.
        """
        ...

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> S:
        """The state a snapshot holds.

        Raises:
            IncompatiblePeerError: it is no snapshot of one.
        """
        ...
