"""What a state must be for this node's model to take it up; looked at before its tensors are fetched, or a model built.

Anybody can announce a state. Its descriptor (some KB) says how many rows of vocabulary it has and how its values lie;
everything else follows from the architecture, which the node has. So what does not fit costs a small request, and
neither disk nor memory. The layout comes from a model without storage (torch's ``meta`` device): milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from manifests import FIRST_MERGE_ID, MAX_VOCABULARY
from trainer.errors import IncompatiblePeerError
from trainer.model import VOCAB_STEP, ModelConfig, Transformer, rows_for
from trainer.network.transfer import Descriptor, Expectation
from trainer.outer.diloco import FlatLayout, FragmentPlan, synchronised_parameters
from trainer.run.node.shared_files import DilocoStates, check_meta, check_vectors

__all__ = ["StateFit", "state_layout"]

_FEWEST_ROWS, _MOST_ROWS = rows_for(FIRST_MERGE_ID), rows_for(MAX_VOCABULARY)


def state_layout(shape: ModelConfig, num_fragments: int) -> FlatLayout:
    """Which value of a shared state is which parameter's, for a model of this shape."""
    with torch.device("meta"):
        model = Transformer(shape)
    return FragmentPlan.of(synchronised_parameters(model), num_fragments).whole()


@dataclass(frozen=True, slots=True)
class StateFit(DilocoStates):
    """What this node can take up.

    Args:
        shape: of its model; other states may have more or fewer rows of vocabulary.
        num_fragments: that it is synchronised in.
        max_bytes: no state larger than this.
    """

    shape: ModelConfig
    num_fragments: int
    max_bytes: int

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
        return check_vectors(descriptor, layout.num_values, max_bytes=self.max_bytes)
