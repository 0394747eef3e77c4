"""What all members of a run share between rounds, and how it is compared, handed on, replaced and grown.

The state of each fragment is immutable: a round makes new tensors and replaces the old ones by a single assignment. So
a round is a transaction (an exception anywhere leaves the state as it was), and checkpoints, digests and late joiners
read it from other threads without a copy or a lock. The price is 8 bytes a parameter of the fragment while old and new
exist side by side.

A model whose vocabulary grew has rows appended to some tensors' first dimension, so a grown tensor's values begin with
the old tensor's. Old rows stay bit for bit; new rows of the anchor are the grown model's, of the other vectors zeros.
The model's new rows must be the same at all members (they are seeded by their number), or the members' anchors diverge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.errors import IncompatiblePeerError, TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.diloco.fragments import FragmentPlan

__all__ = ["FragmentState", "ReplicaState", "SharedState", "grown_state"]


@dataclass(frozen=True, slots=True, eq=False)
class FragmentState:
    """One fragment; [P] fp32 on the CPU each, never changed in place.

    Args:
        anchor: parameters after the last outer step, from which the next pseudo-gradient is measured.
        momentum: of the outer optimizer.
        reference: the last accepted pseudo-gradient; zeros before the first.
        residual: what this node's lossy encodings left out, its own; None: nothing.
    """

    anchor: Tensor
    momentum: Tensor
    reference: Tensor
    residual: Tensor | None = None

    @classmethod
    def start(cls, anchor: Tensor) -> FragmentState:
        """Returns the state before the first round."""
        return cls(anchor, torch.zeros_like(anchor), torch.zeros_like(anchor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedState:
    """The state all members of a run have alike, as one hands it to another; compare by :meth:`digest`."""

    outer_step: int
    """Outer steps in which every fragment was synchronised."""
    fragment: int = 0
    """The next fragment; those before it are one round further than ``outer_step`` says."""
    num_inner_steps: int
    """Inner steps of the rounds so far: where the schedule of a late joiner begins."""
    vocab_rows: int
    """Rows of embedding and output."""
    layout_digest: str
    """:meth:`FragmentPlan.digest`."""
    anchor: Tensor
    """[P] fp32, all fragments one after another; so are the others."""
    momentum: Tensor
    """[P] fp32."""
    reference: Tensor
    """[P] fp32, the last accepted outer pseudo-gradient."""

    def digest(self) -> str:
        """Returns the SHA-256 over numbers, layout and all values, lower-case hex."""
        numbers = (self.outer_step, self.fragment, self.num_inner_steps, self.vocab_rows)
        return _digest(numbers, self.layout_digest, (self.anchor, self.momentum, self.reference))


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaState:
    """A member's state between rounds: what is shared, and its own residuals.

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
        """The next fragment."""
        return self.round_index % len(self.fragments)

    def committed(self, new: FragmentState, num_inner_steps: int) -> ReplicaState:
        """Returns the state after a round of :attr:`fragment` with ``num_inner_steps`` of work."""
        fragments = (*self.fragments[: self.fragment], new, *self.fragments[self.fragment + 1 :])
        return replace(
            self,
            round_index=self.round_index + 1,
            num_inner_steps=self.num_inner_steps + num_inner_steps,
            fragments=fragments,
        )

    def shared(self, layout_digest: str) -> SharedState:
        """Returns what a late joiner needs; with one fragment nothing is copied, so treat the tensors as read-only."""
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
        """Returns :meth:`SharedState.digest`, without joining the fragments."""
        numbers = (self.outer_step, self.fragment, self.num_inner_steps, self.vocab_rows)
        anchors = (fragment.anchor for fragment in self.fragments)
        momenta = (fragment.momentum for fragment in self.fragments)
        references = (fragment.reference for fragment in self.fragments)
        return _digest(numbers, layout_digest, (*anchors, *momenta, *references))

    @classmethod
    def adopted(cls, shared: SharedState, plan: FragmentPlan) -> ReplicaState:
        """Returns a copy of another member's state, without residuals.

        Raises:
            IncompatiblePeerError: it has another layout, or its numbers or vectors are invalid.
        """
        whole = plan.whole()
        whole.require_same(shared.layout_digest, "the state to adopt")
        if shared.outer_step < 0 or not 0 <= shared.fragment < len(plan.layouts):
            raise IncompatiblePeerError(
                f"expected outer step 0 or later and a fragment under {len(plan.layouts)}, "
                f"found {shared.outer_step} and {shared.fragment} in the state to adopt"
            )
        vectors = [_checked(getattr(shared, name), whole, name) for name in ("anchor", "momentum", "reference")]
        return cls(
            round_index=shared.outer_step * len(plan.layouts) + shared.fragment,
            num_inner_steps=shared.num_inner_steps,
            vocab_rows=shared.vocab_rows,
            fragments=tuple(FragmentState(*(vector[place].clone() for vector in vectors)) for place in plan.slices()),
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


def grown_state(
    state: ReplicaState,
    old_plan: FragmentPlan,
    new_plan: FragmentPlan,
    tensors: Mapping[str, Tensor],
    vocab_rows: int,
) -> ReplicaState:
    """Returns the state for a grown model.

    Args:
        state: before.
        old_plan: layout of ``state``.
        new_plan: of the grown model.
        tensors: the grown model's parameters, for the anchor's new rows.
        vocab_rows: its rows now.

    Raises:
        TrainerUsageError: the plans have other names, or a tensor changed in another way than getting more rows.
    """
    fragments = []
    for old, new, fragment in zip(old_plan.layouts, new_plan.layouts, state.fragments, strict=True):
        _check_grown(old, new)
        fragments.append(
            FragmentState(
                anchor=_grown(fragment.anchor, old, new.gather(tensors), new),
                momentum=_grown(fragment.momentum, old, torch.zeros(new.num_values), new),
                reference=_grown(fragment.reference, old, torch.zeros(new.num_values), new),
                residual=None
                if fragment.residual is None
                else _grown(fragment.residual, old, torch.zeros(new.num_values), new),
            )
        )
    return replace(state, vocab_rows=vocab_rows, fragments=tuple(fragments))


def _grown(old: Tensor, old_layout: FlatLayout, new: Tensor, new_layout: FlatLayout) -> Tensor:
    """Writes old values over the beginning of each of the new vector's tensors; returns ``new``."""
    for (_, _, old_place), (_, _, new_place) in zip(old_layout.slices(), new_layout.slices(), strict=True):
        new[new_place.start : new_place.start + old_place.stop - old_place.start] = old[old_place]
    return new


def _check_grown(old: FlatLayout, new: FlatLayout) -> None:
    if old.names != new.names:
        changed = sorted(set(old.names) ^ set(new.names)) or ["their order"]
        raise TrainerUsageError(f"expected the same tensors in the grown model, found a difference in {changed[0]}")
    for name, before, after in zip(old.names, old.shapes, new.shapes, strict=True):
        longer = len(before) == len(after) > 0 and before[1:] == after[1:] and before[0] <= after[0]
        if before != after and not longer:
            raise TrainerUsageError(
                f"expected {name!r} of {list(before)} to have more rows in the grown model, found {list(after)}"
            )
