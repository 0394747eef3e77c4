"""Which shared states a stage's worker can take up under DiLoCo; see `trainer.node.fitting` for whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.diloco import FragmentPlan, SharedState
from trainer.errors import IncompatiblePeerError
from trainer.node.shared_files import VECTORS, check_meta, from_snapshot, snapshot_meta, snapshot_tensors
from trainer.state import Descriptor, Expectation
from trainer.state.descriptor import Meta

__all__ = ["StageFit"]


@dataclass(frozen=True, slots=True)
class StageFit:
    """The form of a stage's state on the network side (a ``StateForm``); its vocabulary does not grow.

    Args:
        plan: of the stage's parameters.
        vocab_rows: of the model.
    """

    plan: FragmentPlan
    vocab_rows: int

    def outer_step(self, shared: SharedState) -> int:
        """How far it is, as announced."""
        return shared.outer_step

    def pack(self, shared: SharedState) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """As a snapshot; first weights are everybody's, and are not handed out."""
        if not shared.outer_step and not shared.fragment:
            return None
        return snapshot_meta(shared), snapshot_tensors(shared)

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SharedState:
        """The state a snapshot holds.

        Raises:
            IncompatiblePeerError: it is no snapshot of one.
        """
        return from_snapshot(meta, tensors)

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """What exactly a state of this descriptor has to be.

        Raises:
            IncompatiblePeerError: this worker cannot take it up.
        """
        meta, layout = check_meta(descriptor.meta), self.plan.whole()
        layout.require_same(meta.layout_digest, "the state to adopt")
        if meta.vocab_rows != self.vocab_rows or meta.fragment >= len(self.plan.layouts):
            raise IncompatiblePeerError(
                f"expected a state of {self.vocab_rows} rows of vocabulary and {len(self.plan.layouts)} fragments, "
                f"found one of {meta.vocab_rows} rows whose next fragment is {meta.fragment}"
            )
        expected = dict.fromkeys(VECTORS, ("float32", (layout.num_values,)))
        if {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors} != expected:
            raise IncompatiblePeerError(
                f"expected a state of {', '.join(VECTORS)} with {layout.num_values} fp32 values each, found another"
            )
        return Expectation(max_bytes=12 * layout.num_values, tensors=expected)
