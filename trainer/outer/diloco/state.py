"""What all members of a run share between rounds: compared, handed on, grown, and saved in a checkpoint.

The state of each fragment is immutable: a round makes new tensors and replaces the old ones by a single assignment. So
a round is a transaction, and checkpoints, digests and late joiners read it from other threads without a copy or a lock;
the price is 8 bytes a parameter meanwhile. When the vocabulary grows, old rows stay bit for bit; new rows of the anchor
are the grown model's, the same at all members (they are seeded by their number), and zeros in the other vectors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.errors import CheckpointMismatchError, IncompatiblePeerError, TrainerUsageError
from trainer.outer.diloco.flat import FlatLayout, FragmentPlan
from trainer.outer.engine.collective import Contribution
from trainer.outer.engine.strategy import PendingWork, StateValue, first_problem

_VERSION = 1
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, eq=False)
class FragmentState:
    """One fragment; [P] fp32 on the CPU each, never changed in place."""

    anchor: Tensor  # Parameters after the last outer step, from which the next pseudo-gradient is measured.
    momentum: Tensor
    reference: Tensor  # The last accepted pseudo-gradient; zeros before the first.
    residual: Tensor | None = None  # What this node's lossy encodings left out, its own; None: nothing.
    basis: Tensor | None = None  # What PowerSGD begins with, of another length; None: nothing yet, or no PowerSGD.

    @classmethod
    def start(cls, anchor: Tensor) -> FragmentState:
        """Returns the state before the first round."""
        return cls(anchor, torch.zeros_like(anchor), torch.zeros_like(anchor))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedState:
    """The state all members of a run have alike, as one hands it to another; compare by :meth:`digest`."""

    outer_step: int  # Outer steps in which every fragment was synchronised.
    fragment: int = 0  # The next fragment; those before it are one round further than ``outer_step`` says.
    num_inner_steps: int  # Inner steps of the rounds so far: where the schedule of a late joiner begins.
    vocab_rows: int  # Rows of embedding and output.
    layout_digest: str  # :meth:`FragmentPlan.digest`.
    anchor: Tensor  # [P] fp32, all fragments one after another; so are the others.
    momentum: Tensor
    reference: Tensor  # The last accepted outer pseudo-gradient.
    bases: Mapping[int, Tensor] = field(default_factory=dict)  # Of PowerSGD, fp32, by fragment; those there are.

    def digest(self) -> str:
        """Returns the SHA-256 over numbers, layout and all values, lower-case hex."""
        return _digest(self, self.layout_digest, (self.anchor, self.momentum, self.reference))


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaState:
    """A member's state between rounds: what is shared, and its own residuals."""

    round_index: int  # Rounds committed; outer step · fragments + next fragment.
    num_inner_steps: int
    vocab_rows: int
    fragments: tuple[FragmentState, ...]  # In the order of the plan.

    @property
    def outer_step(self) -> int:
        """Outer steps in which every fragment was synchronised."""
        return self.round_index // len(self.fragments)

    @property
    def fragment(self) -> int:
        """The next fragment."""
        return self.round_index % len(self.fragments)

    @property
    def bases(self) -> dict[int, Tensor]:
        """PowerSGD's bases by fragment; those there are."""
        return {index: it.basis for index, it in enumerate(self.fragments) if it.basis is not None}

    def committed(self, new: FragmentState, num_inner_steps: int) -> ReplicaState:
        """Returns the state after a round of :attr:`fragment` with ``num_inner_steps`` of work."""
        return replace(
            self,
            round_index=self.round_index + 1,
            num_inner_steps=self.num_inner_steps + num_inner_steps,
            fragments=(*self.fragments[: self.fragment], new, *self.fragments[self.fragment + 1 :]),
        )

    def shared(self, layout_digest: str) -> SharedState:
        """Returns what a late joiner needs; with one fragment nothing is copied, so treat the tensors as read-only."""
        anchor, momentum, reference = (
            vectors[0] if len(vectors) == 1 else torch.cat(vectors) for vectors in self._vectors()
        )
        return SharedState(
            outer_step=self.outer_step,
            fragment=self.fragment,
            num_inner_steps=self.num_inner_steps,
            vocab_rows=self.vocab_rows,
            layout_digest=layout_digest,
            anchor=anchor,
            momentum=momentum,
            reference=reference,
            bases=self.bases,
        )

    def digest(self, layout_digest: str) -> str:
        """Returns :meth:`SharedState.digest`, without joining the fragments."""
        return _digest(self, layout_digest, (vector for vectors in self._vectors() for vector in vectors))

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
        anchor, momentum, reference = (
            _checked(getattr(shared, name), whole, name) for name in ("anchor", "momentum", "reference")
        )
        bases = _checked_bases(shared.bases, plan)
        return cls(
            round_index=shared.outer_step * len(plan.layouts) + shared.fragment,
            num_inner_steps=shared.num_inner_steps,
            vocab_rows=shared.vocab_rows,
            fragments=tuple(
                FragmentState(
                    anchor[place].clone(), momentum[place].clone(), reference[place].clone(), basis=bases.get(index)
                )
                for index, place in enumerate(plan.slices())
            ),
        )

    def _vectors(self) -> Sequence[list[Tensor]]:
        """Anchors, momenta and references, each by fragment."""
        shared = ([it.anchor, it.momentum, it.reference] for it in self.fragments)
        return [list(vectors) for vectors in zip(*shared, strict=True)]


def _checked(vector: Tensor, layout: FlatLayout, name: str) -> Tensor:
    fits = vector.shape == (layout.num_values,) and vector.dtype == torch.float32
    if not fits or not bool(torch.isfinite(vector).all()):
        raise IncompatiblePeerError(
            f"expected {layout.num_values} finite fp32 values as {name} of the state to adopt, "
            f"found {list(vector.shape)} {vector.dtype}{'' if not fits else ' with values that are not finite'}"
        )
    return vector


def _checked_bases(bases: Mapping[int, Tensor], plan: FragmentPlan) -> dict[int, Tensor]:
    """Copies of PowerSGD's bases; one has fewer values than its fragment, since factors are to save some."""
    for index, basis in bases.items():
        most = plan.layouts[index].num_values if 0 <= index < len(plan.layouts) else 0
        is_vector = basis.dim() == 1 and basis.dtype == torch.float32 and basis.numel() < most
        if not is_vector or not bool(torch.isfinite(basis).all()):
            raise IncompatiblePeerError(
                f"expected under {most} finite fp32 values as basis of fragment {index} of the state to adopt, found "
                f"{list(basis.shape)} {basis.dtype}"
            )
    return {index: basis.clone() for index, basis in bases.items()}


def _digest(state: SharedState | ReplicaState, layout_digest: str, vectors: Iterable[Tensor]) -> str:
    numbers = [state.outer_step, state.fragment, state.num_inner_steps, state.vocab_rows]
    running = hashlib.sha256(json.dumps([*numbers, layout_digest], separators=(",", ":")).encode())
    for vector in vectors:
        running.update(vector.detach().contiguous().numpy().data)
    for index, basis in sorted(state.bases.items()):
        running.update(f"basis {index}".encode())
        running.update(basis.detach().contiguous().numpy().data)
    return running.hexdigest()


def grown_state(
    state: ReplicaState, old_plan: FragmentPlan, new_plan: FragmentPlan, tensors: Mapping[str, Tensor], vocab_rows: int
) -> ReplicaState:
    """Returns the state for a grown model, whose parameters (``tensors``) are the anchor's new rows.

    PowerSGD begins anew, at all members alike.

    Raises:
        TrainerUsageError: the plans have other names, or a tensor changed in another way than getting more rows.
    """
    fragments = []
    for old, new, it in zip(old_plan.layouts, new_plan.layouts, state.fragments, strict=True):
        _check_grown(old, new)
        zeros = torch.zeros(new.num_values)
        fragments.append(
            FragmentState(
                anchor=_grown(it.anchor, old, new.gather(tensors), new),
                momentum=_grown(it.momentum, old, zeros.clone(), new),
                reference=_grown(it.reference, old, zeros.clone(), new),
                residual=None if it.residual is None else _grown(it.residual, old, zeros, new),
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


class _Saved(BaseModel):
    """Plain values and tensors, so that ``torch.load(weights_only=True)`` reads them."""

    model_config = ConfigDict(frozen=True, strict=True, arbitrary_types_allowed=True)


_SavedT = TypeVar("_SavedT", bound=_Saved)


class SavedRound(_Saved):
    """A round that was under way, with what is needed to begin it again."""

    vector: Tensor  # [P] fp32, the contribution.
    num_batches: _Count
    age_s: float  # Of its batches, when it was made.
    steps_left: _Count  # Inner steps until its result is merged.
    progress: float = 1.0  # Share of the round's planned work that is in it; older checkpoints do not have it,
    num_steps: _Count = 0  # nor this,
    lag: _Count = 0  # nor this.

    @classmethod
    def of(cls, contribution: Contribution, steps_left: int) -> SavedRound:
        """Returns what a checkpoint needs to begin this round again."""
        return cls(
            vector=contribution.vector,
            num_batches=contribution.num_batches,
            age_s=contribution.age_s,
            steps_left=steps_left,
            progress=contribution.progress,
            num_steps=contribution.num_steps,
            lag=contribution.lag,
        )


class _SavedFragment(_Saved):
    anchor: Tensor
    momentum: Tensor
    reference: Tensor
    residual: Tensor | None = None
    basis: Tensor | None = None
    num_batches: _Count
    since_s: float
    num_steps: _Count | None = None  # Older checkpoints do not have it: the steps since the last round.
    lag: _Count = 0


class SavedDiLoCo(_Saved):
    """Everything of a :class:`~trainer.outer.diloco.trainer.DiLoCoTrainer` that is not a parameter or an option."""

    version: Literal[1] = 1
    layout_digest: str
    round_index: _Count
    outer_step: int = 0  # For readers of the checkpoint; follows from ``round_index``.
    num_inner_steps: _Count
    vocab_rows: _Count
    inner_step: _Count  # Inner steps since the last round was tried.
    fragments: list[_SavedFragment]
    flight: SavedRound | None = None

    @staticmethod
    def of(
        state: ReplicaState,
        layout_digest: str,
        inner_step: int,
        pending: list[PendingWork],
        saved_round: SavedRound | None,
    ) -> dict[str, StateValue]:
        """Returns the values of a checkpoint; tensors are not copied."""
        works = zip(state.fragments, pending, strict=True)
        return {
            "version": _VERSION,
            "layout_digest": layout_digest,
            "round_index": state.round_index,
            "outer_step": state.outer_step,
            "num_inner_steps": state.num_inner_steps,
            "vocab_rows": state.vocab_rows,
            "inner_step": inner_step,
            "fragments": [{**_values(fragment), **_values(work)} for fragment, work in works],
            "flight": None if saved_round is None else dict(saved_round),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, StateValue], plan: FragmentPlan) -> SavedDiLoCo:
        """Checks every value of a checkpoint for a model of this plan, and copies the tensors.

        Raises:
            CheckpointMismatchError: another version, another model, or values that are missing or of another kind.
        """
        if saved.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"expected DiLoCo state of version {_VERSION}, found version {str(saved.get('version'))[:20]}"
            )
        try:
            found = cls.model_validate(dict(saved))
        except ValidationError as error:
            raise CheckpointMismatchError(f"expected a DiLoCo state, found another: {first_problem(error)}") from error
        if found.layout_digest != plan.digest():
            raise CheckpointMismatchError(
                f"expected DiLoCo state of this model (layout {plan.digest()[:12]}), found {found.layout_digest[:12]}; "
                "use the preset, vocabulary and diloco.num_fragments the checkpoint was made with"
            )
        if len(found.fragments) != len(plan.layouts):
            raise CheckpointMismatchError(f"expected {len(plan.layouts)} fragments, found {len(found.fragments)}")
        flight = found.flight
        if flight is not None:
            layout = plan.layouts[found.round_index % len(plan.layouts)]
            progress = min(1.0, max(0.0, flight.progress))
            flight = _copied(flight, layout).model_copy(update={"progress": progress})
        fragments = [_copied(it, layout) for it, layout in zip(found.fragments, plan.layouts, strict=True)]
        return found.model_copy(update={"flight": flight, "fragments": fragments})

    def state(self) -> ReplicaState:
        """Returns the state that was saved."""
        return ReplicaState(
            round_index=self.round_index,
            num_inner_steps=self.num_inner_steps,
            vocab_rows=self.vocab_rows,
            fragments=tuple(
                FragmentState(it.anchor, it.momentum, it.reference, it.residual, it.basis) for it in self.fragments
            ),
        )

    def pending(self) -> list[PendingWork]:
        """Returns the work of each fragment that waits for a round."""
        return [
            PendingWork(it.num_batches, it.since_s, self.inner_step if it.num_steps is None else it.num_steps, it.lag)
            for it in self.fragments
        ]


def _values(it: FragmentState | PendingWork) -> dict[str, StateValue]:
    return {each.name: getattr(it, each.name) for each in fields(it)}


def _copied(saved: _SavedT, layout: FlatLayout) -> _SavedT:
    """Copies all tensors, so that later changes to the checkpoint's have no effect here."""
    vectors = {name: value for name, value in saved if isinstance(value, Tensor)}
    for name, vector in vectors.items():
        fits = vector.dim() == 1 if name == "basis" else vector.shape == (layout.num_values,)
        if not fits or vector.dtype != torch.float32:
            raise CheckpointMismatchError(
                f"expected [{layout.num_values}] fp32 in the DiLoCo state, found {list(vector.shape)} {vector.dtype}"
            )
    return saved.model_copy(update={name: vector.detach().to("cpu", copy=True) for name, vector in vectors.items()})
