"""What all members of a run share between rounds, and how it is compared, handed on and replaced.

The state of each fragment is immutable: a round makes new tensors and puts them in the old ones' place with a single
assignment. That makes a round a transaction (an exception anywhere leaves the state as it was), and lets checkpoints,
digests and late joiners read it from other threads without a copy or a lock. The price is 8 bytes a parameter of the
fragment for the moment in which old and new exist side by side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.errors import IncompatiblePeerError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.diloco.fragments import FragmentPlan

__all__ = ["FragmentState", "ReplicaState", "SharedState"]


@dataclass(frozen=True, slots=True, eq=False)
class FragmentState:
    """One fragment; [P] fp32 on the CPU each, never changed in place.

    Args:
        anchor: parameters after the last outer step, where the next pseudo-gradient is measured from.
        momentum: of the outer optimizer.
        reference: the last accepted pseudo-gradient; zeros before the first.
        residual: this node's own: what its lossy encodings left out; None where there is nothing.
    """

    anchor: Tensor
    momentum: Tensor
    reference: Tensor
    residual: Tensor | None = None

    @classmethod
    def start(cls, anchor: Tensor) -> FragmentState:
        """Before the first round."""
        return cls(anchor, torch.zeros_like(anchor), torch.zeros_like(anchor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedState:
    """The state all members of a run have alike, as one hands it to another; compare by :meth:`digest`."""

    outer_step: int
    """Outer steps in which every fragment was synchronised."""
    fragment: int = 0
    """The fragment that is next; those before it are one round further than ``outer_step`` says."""
    num_inner_steps: int
    """Inner steps that the rounds so far stand for: where the schedule of a late joiner begins."""
    vocab_rows: int
    """Rows of embedding and output."""
    layout_digest: str
    """Which value is whose, :meth:`FragmentPlan.digest`."""
    anchor: Tensor
    """[P] fp32, all fragments one after another; so are the others."""
    momentum: Tensor
    """[P] fp32."""
    reference: Tensor
    """[P] fp32, the last accepted outer pseudo-gradient."""

    def digest(self) -> str:
        """SHA-256 over numbers, layout and all values, lower-case hex; the same as of the member it came from."""
        numbers = (self.outer_step, self.fragment, self.num_inner_steps, self.vocab_rows)
        return _digest(numbers, self.layout_digest, (self.anchor, self.momentum, self.reference))


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaState:
    """A member's state between rounds: what is shared, and the residuals that are its own.

    Args:
        round_index: rounds committed; outer step · fragments + next fragment.
        num_inner_steps: as in :class:`SharedState`.
        vocab_rows: as in :class:`SharedState`.
        fragments: in the order of the plan.
    """

    round_index: int
    num_inner_steps: int
    vocab_rows: int
    fragments: tuple[FragmentState, ...]

    @property
    def outer_step(self) -> int:
        """Outer steps in which every fragment was synchronised."""
        return self.round_index // len(self.fragments)

    @property
    def fragment(self) -> int:
        """The fragment whose turn is next."""
        return self.round_index % len(self.fragments)

    def committed(self, new: FragmentState, num_inner_steps: int) -> ReplicaState:
        """The state after a round of :attr:`fragment` that stood for ``num_inner_steps``."""
        fragments = (*self.fragments[: self.fragment], new, *self.fragments[self.fragment + 1 :])
        return replace(
            self,
            round_index=self.round_index + 1,
            num_inner_steps=self.num_inner_steps + num_inner_steps,
            fragments=fragments,
        )

    def shared(self, layout_digest: str) -> SharedState:
        """What a late joiner needs; with one fragment nothing is copied, so treat the tensors as read-only."""
        return SharedState(
            outer_step=self.outer_step,
            fragment=self.fragment,
            num_inner_steps=self.num_inner_steps,
            vocab_rows=self.vocab_rows,
            layout_digest=layout_digest,
            anchor=_joined([fragment.anchor for fragment in self.fragments]),
            momentum=_joined([fragment.momentum for fragment in self.fragments]),
            reference=_joined([fragment.reference for fragment in self.fragments]),
        )

    def digest(self, layout_digest: str) -> str:
        """:meth:`SharedState.digest`, without joining the fragments first."""
        numbers = (self.outer_step, self.fragment, self.num_inner_steps, self.vocab_rows)
        anchors = (fragment.anchor for fragment in self.fragments)
        momenta = (fragment.momentum for fragment in self.fragments)
        references = (fragment.reference for fragment in self.fragments)
        return _digest(numbers, layout_digest, (*anchors, *momenta, *references))

    @classmethod
    def adopted(cls, shared: SharedState, plan: FragmentPlan) -> ReplicaState:
        """A copy of another member's state, with nothing of one's own.

        Raises:
            IncompatiblePeerError: it is of another layout, or its vectors are not what they should be.
        """
        whole = plan.whole()
        whole.require_same(shared.layout_digest, "the state to adopt")
        if shared.outer_step < 0 or not 0 <= shared.fragment < len(plan.layouts):
            raise IncompatiblePeerError(
                f"expected outer step 0 or later and a fragment under {len(plan.layouts)}, "
                f"found {shared.outer_step} and {shared.fragment} in the state to adopt"
            )
        anchor, momentum, reference = (
            _checked(vector, whole, name)
            for name, vector in (
                ("anchor", shared.anchor),
                ("momentum", shared.momentum),
                ("reference", shared.reference),
            )
        )
        return cls(
            round_index=shared.outer_step * len(plan.layouts) + shared.fragment,
            num_inner_steps=shared.num_inner_steps,
            vocab_rows=shared.vocab_rows,
            fragments=tuple(
                FragmentState(anchor[place].clone(), momentum[place].clone(), reference[place].clone())
                for place in plan.slices()
            ),
        )


def _joined(vectors: list[Tensor]) -> Tensor:
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def _checked(vector: Tensor, layout: FlatLayout, name: str) -> Tensor:
    fits = vector.shape == (layout.num_values,) and vector.dtype == torch.float32
    if not fits or not bool(torch.isfinite(vector).all()):
        raise IncompatiblePeerError(
            f"expected {layout.num_values} finite fp32 values as {name} of the state to adopt, "
            f"found {list(vector.shape)} {vector.dtype}{'' if not fits else ' with values that are not finite'}"
        )
    return vector


def _digest(numbers: tuple[int, ...], layout_digest: str, vectors: Iterable[Tensor]) -> str:
    running = hashlib.sha256(json.dumps([*numbers, layout_digest], separators=(",", ":")).encode())
    for vector in vectors:
        running.update(vector.detach().contiguous().numpy().data)
    return running.hexdigest()
