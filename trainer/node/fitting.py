"""What a state must be for this node's model to take it up; looked at before its tensors are fetched, or a model built.

Anybody can announce a state. Its descriptor (some KB) says how many rows of vocabulary it has and how its values lie;
everything else follows from the architecture, which the node has. So what does not fit costs a small request, and
neither disk nor memory. The layout comes from a model without storage (torch's ``meta`` device): milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manifests import FIRST_MERGE_ID, MAX_VOCABULARY
from trainer.diloco import FlatLayout, FragmentPlan, SharedState, synchronised_parameters
from trainer.errors import IncompatiblePeerError
from trainer.model import VOCAB_STEP, ModelConfig, Transformer, rows_for
from trainer.node.shared_files import VECTORS, check_meta, from_snapshot, snapshot_meta, snapshot_tensors
from trainer.state import Descriptor, Expectation
from trainer.state.descriptor import Meta

__all__ = ["StateFit", "state_layout"]

_FEWEST_ROWS, _MOST_ROWS = rows_for(FIRST_MERGE_ID), rows_for(MAX_VOCABULARY)


def state_layout(shape: ModelConfig, num_fragments: int) -> FlatLayout:
    """Which value of a shared state is which parameter's, for a model of this shape."""
    with torch.device("meta"):
        model = Transformer(shape)
    return FragmentPlan.of(synchronised_parameters(model), num_fragments).whole()


@dataclass(frozen=True, slots=True)
class StateFit:
    """What this node can take up.

    Args:
        shape: of its model; other states may have more or fewer rows of vocabulary.
        num_fragments: that it is synchronised in.
        max_bytes: no state larger than this.
    """

    shape: ModelConfig
    num_fragments: int
    max_bytes: int

    def outer_step(self, shared: SharedState) -> int:
        """See `trainer.node.state_form.StateForm`."""
        return shared.outer_step

    def pack(self, shared: SharedState) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """As a snapshot; first weights have no vote, or two newcomers would outvote the one node that has trained."""
        if not shared.outer_step and not shared.fragment:
            return None
        return snapshot_meta(shared), snapshot_tensors(shared)

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SharedState:
        """See `trainer.node.state_form.StateForm`."""
        return from_snapshot(meta, tensors)

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """What exactly a state of this descriptor has to be.

        Raises:
            IncompatiblePeerError: it does not fit; the message names the first difference.
        """
        if descriptor.size_bytes > self.max_bytes:
            raise IncompatiblePeerError(
                f"expected a state of at most {self.max_bytes} bytes, found one of {descriptor.size_bytes}"
            )
        meta = check_meta(descriptor.meta)
        if not _FEWEST_ROWS <= meta.vocab_rows <= _MOST_ROWS or meta.vocab_rows % VOCAB_STEP:
            raise IncompatiblePeerError(
                f"expected a state of {_FEWEST_ROWS} to {_MOST_ROWS} rows of vocabulary, in steps of {VOCAB_STEP}, "
                f"found one of {meta.vocab_rows}"
            )
        if meta.fragment >= self.num_fragments:
            raise IncompatiblePeerError(
                f"expected a state whose next fragment is under {self.num_fragments}, found {meta.fragment}"
            )
        layout = state_layout(replace(self.shape, vocab_size=meta.vocab_rows), self.num_fragments)
        layout.require_same(meta.layout_digest, "the state to adopt")
        expected = ("float32", (layout.num_values,))
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors}
        if found != dict.fromkeys(VECTORS, expected):
            raise IncompatiblePeerError(
                f"expected a state of {', '.join(VECTORS)} with {layout.num_values} fp32 values each "
                f"({meta.vocab_rows} rows of vocabulary), found {_told(found)}"
            )
        return Expectation(max_bytes=self.max_bytes, tensors=dict.fromkeys(VECTORS, expected))


def _told(found: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    named = [f"{name[:32]!r} {dtype} {list(shape)}" for name, (dtype, shape) in found.items()]
    return ", ".join(named[: len(VECTORS)] + ["…"] * (len(named) > len(VECTORS))) or "none"
