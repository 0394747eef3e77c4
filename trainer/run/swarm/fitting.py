"""Which shared states a stage's worker can take up under DiLoCo; see `trainer.run.node.fitting` for whole models."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import IncompatiblePeerError
from trainer.network.transfer import Descriptor, Expectation
from trainer.outer.diloco import FragmentPlan
from trainer.run.node.shared_files import DilocoStates, check_meta, check_vectors

__all__ = ["StageFit"]


@dataclass(frozen=True, slots=True)
class StageFit(DilocoStates):
    """The form of a stage's state on the network side (a ``StateForm``); its vocabulary does not grow.

    Args:
        plan: of the stage's parameters.
        vocab_rows: of the model.
    """

    plan: FragmentPlan
    vocab_rows: int

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
        return check_vectors(descriptor, layout.num_values, max_bytes=12 * layout.num_values)
