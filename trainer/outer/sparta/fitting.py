"""Which states a node can take up, told from their descriptors, before a tensor is fetched; see `trainer.run.node`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.errors import IncompatiblePeerError
from trainer.network.transfer import Descriptor, Expectation
from trainer.network.transfer.descriptor import Meta
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.sparta.snapshot import check_meta, from_snapshot, snapshot_meta, snapshot_shapes, snapshot_tensors
from trainer.outer.sparta.state import SpartaState

__all__ = ["SpartaFit"]


@dataclass(frozen=True, slots=True)
class SpartaFit:
    """The form of a replica's state on the network side (a ``StateForm``).

    Args:
        layout: of the parameters (``SpartaTrainer.layout``).
        vocab_rows: of the model.
    """

    layout: FlatLayout
    vocab_rows: int = 0

    @property
    def max_bytes(self) -> int:
        """Size of a state: 12 bytes a parameter, 4 a tensor."""
        return 12 * self.layout.num_values + 4 * len(self.layout.names)

    def outer_step(self, shared: SpartaState) -> int:
        """How far it is, as announced: its round, which `choose_recent_state` goes by."""
        return shared.round_index

    def pack(self, shared: SpartaState) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """As a snapshot; first weights are everybody's, and are not handed out."""
        if not shared.num_inner_steps and not shared.round_index:
            return None
        return snapshot_meta(shared), snapshot_tensors(shared)

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SpartaState:
        """The state a snapshot holds, checked in every value.

        Raises:
            IncompatiblePeerError: it is none, or does not fit.
        """
        shared = from_snapshot(meta, tensors)
        shared.check(self.layout, vocab_rows=self.vocab_rows)
        return shared

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """What exactly a state of this descriptor has to be.

        Raises:
            IncompatiblePeerError: this node cannot take it up.
        """
        meta = check_meta(descriptor.meta)
        self.layout.require_same(meta.layout_digest, "the state to adopt")
        if meta.vocab_rows != self.vocab_rows:
            raise IncompatiblePeerError(
                f"expected a state of {self.vocab_rows} rows of vocabulary, found one of {meta.vocab_rows}"
            )
        expected = snapshot_shapes(self.layout)
        if {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors} != expected:
            raise IncompatiblePeerError(
                f"expected a state of {', '.join(expected)} over {self.layout.num_values} values, "
                f"found other tensors or shapes"
            )
        return Expectation(max_bytes=self.max_bytes, tensors=expected)
