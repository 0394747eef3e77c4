"""What replicas under averaged gradients have alike: weights, AdamW's moments, counts, and the rounds behind them.

A state is immutable: a step makes new vectors and replaces the old ones by a single assignment, so checkpoints and
joiners read it from other threads without a copy. It is named by its *lineage*, a SHA-256 over the first weights and
the results of all rounds since: with one arithmetic at all members (`optimizer`) equal lineages are equal states, and
no step has to wait for 12 bytes a parameter to be hashed. The digest by which it is handed to joiners is of all its
bytes (`trainer.network.transfer`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.compression.powersgd import low_rank_plan
from trainer.errors import CheckpointMismatchError, IncompatiblePeerError
from trainer.network.transfer import Descriptor, Expectation
from trainer.network.transfer.descriptor import Meta
from trainer.outer.diloco.flat import FlatLayout, is_finite
from trainer.outer.engine.strategy import StateValue, first_problem
from trainer.outer.grad.averaging import Packing

_VECTORS = ("parameters", "exp_avg", "exp_avg_sq")
_BASIS = "powersgd_basis"
_Count = Annotated[int, Field(ge=0, lt=2**48)]
"""No run gets as far; and beyond 2**53 a node could not announce its round."""
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradState:
    """The state between two rounds; tensors are on the CPU, and never changed."""

    round_index: int  # Rounds committed, those of slices included.
    num_steps: int  # Steps, those included that changed nothing: the version, and the place in the schedule.
    num_updates: int  # Steps that changed the weights: AdamW's.
    num_tokens: int  # In all steps, of all members.
    vocab_rows: int  # Rows of embedding and output; 0 for a stage with neither.
    layout_digest: str  # :meth:`FlatLayout.digest`.
    lineage: str
    parameters: Tensor  # [P] fp32.
    exp_avg: Tensor  # [P] fp32, AdamW's.
    exp_avg_sq: Tensor  # [P] fp32, AdamW's; 0 or more.
    basis: Tensor  # What PowerSGD begins the next round with, fp32; empty where nothing is factored.

    @classmethod
    def start(cls, parameters: Tensor, layout: FlatLayout, vocab_rows: int, num_basis: int = 0) -> GradState:
        """Returns the state before the first round; a basis of zeros is as good as none."""
        first = hashlib.sha256(f"{layout.digest()} {num_basis}".encode())
        first.update(parameters.detach().contiguous().numpy().data)
        return cls(
            round_index=0,
            num_steps=0,
            num_updates=0,
            num_tokens=0,
            vocab_rows=vocab_rows,
            layout_digest=layout.digest(),
            lineage=first.hexdigest(),
            parameters=parameters,
            exp_avg=torch.zeros_like(parameters),
            exp_avg_sq=torch.zeros_like(parameters),
            basis=torch.zeros(num_basis),
        )

    @property
    def num_inner_steps(self) -> int:
        """Where the schedule of a joiner begins; as of other strategies' states."""
        return self.num_steps

    def following(self, result: Tensor, result_digest: str, **changes: Any) -> GradState:
        """Returns the state after a round with this result; its digest is computed where the engine has none."""
        digest = result_digest or hashlib.sha256(result.detach().contiguous().numpy().data).hexdigest()
        lineage = hashlib.sha256(f"{self.lineage}:{self.round_index}:{digest}".encode()).hexdigest()
        return replace(self, round_index=self.round_index + 1, lineage=lineage, **changes)

    def check(self, layout: FlatLayout, vocab_rows: int, num_basis: int) -> None:
        """Refuses a state that does not belong to a model of this layout, or is not sound.

        Raises:
            IncompatiblePeerError: the message names the first thing that does not fit.
        """
        layout.require_same(self.layout_digest, "the state to adopt")
        if self.vocab_rows != vocab_rows or self.num_updates > self.num_steps or self.num_steps > self.round_index:
            raise IncompatiblePeerError(
                f"expected {vocab_rows} rows of vocabulary, and no more steps than rounds nor updates than steps, in "
                f"the state to adopt, found {self.vocab_rows} rows, {self.round_index} rounds, {self.num_steps} steps "
                f"and {self.num_updates} updates"
            )
        shapes = shapes_of(layout, num_basis)
        for name, tensor in self.tensors().items():
            fits = tuple(tensor.shape) == shapes.get(name) and tensor.dtype == torch.float32
            if not fits or not is_finite(tensor):
                raise IncompatiblePeerError(
                    f"expected finite fp32 values of shape {list(shapes.get(name, ()))} as {name} of the state to "
                    f"adopt, found {list(tensor.shape)} {tensor.dtype}{' that are not finite' if fits else ''}"
                )
        if bool((self.exp_avg_sq < 0).any()):
            raise IncompatiblePeerError(
                "expected second moments of 0 or more in the state to adopt, found negative ones"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by the names they have in a snapshot."""
        vectors = {name: getattr(self, name) for name in _VECTORS}
        return {**vectors, **({_BASIS: self.basis} if self.basis.numel() else {})}


def shapes_of(layout: FlatLayout, num_basis: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a state's tensors, by the names they have in a snapshot."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_VECTORS, (layout.num_values,))
    return {**shapes, **({_BASIS: (num_basis,)} if num_basis else {})}


def num_basis_of(layout: FlatLayout, powersgd_rank: int) -> int:
    """Returns how many values PowerSGD's basis has for gradients of this layout; 0 for rank 0, and without matrices."""
    return low_rank_plan(Packing.of(layout).layout.shapes, powersgd_rank).num_basis if powersgd_rank else 0


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )


class GradMeta(_Strict):
    """A `GradState` without its tensors, as its descriptor has it."""

    kind: Literal["grad"] = "grad"
    version: Literal[1] = 1
    round_index: _Count
    num_steps: _Count
    num_updates: _Count
    num_tokens: _Count
    vocab_rows: _Count
    layout_digest: _Digest
    lineage: _Digest

    @classmethod
    def of(cls, state: GradState) -> GradMeta:
        """Returns the numbers of a state."""
        names = cls.model_fields.keys() - {"kind", "version"}
        return cls(**{name: getattr(state, name) for name in names})

    def numbers(self) -> dict[str, Any]:
        """Returns the fields of `GradState` that are no tensors."""
        return self.model_dump(exclude={"kind", "version"})


def check_meta(meta: Mapping[str, Any]) -> GradMeta:
    """Reads what a descriptor says of a state; raises IncompatiblePeerError if it does not describe one."""
    try:
        return GradMeta.model_validate(dict(meta))
    except ValidationError as error:
        raise IncompatiblePeerError(
            f"expected the descriptor of a state of averaged gradients, version 1, found another: "
            f"{first_problem(error)}"
        ) from error


@dataclass(frozen=True, slots=True)
class GradFit:
    """The form of a replica's state on the network side (a ``StateForm``): which states a node can take up."""

    layout: FlatLayout
    vocab_rows: int = 0
    num_basis: int = 0  # Values of PowerSGD's basis.

    @classmethod
    def of(cls, layout: FlatLayout, vocab_rows: int, powersgd_rank: int = 0) -> GradFit:
        """Returns the form of a replica's state, with what PowerSGD adds to it."""
        return cls(layout, vocab_rows, num_basis_of(layout, powersgd_rank))

    def outer_step(self, shared: GradState) -> int:
        """Returns the state's round, as announced."""
        return shared.round_index

    def pack(self, shared: GradState) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """Returns descriptor and tensors of a snapshot; None for first weights, which are the same at all nodes."""
        if not shared.round_index:
            return None
        return GradMeta.of(shared).model_dump(), shared.tensors()

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> GradState:
        """Returns the state in a snapshot; raises IncompatiblePeerError if it is none, or does not fit."""
        found = check_meta(meta).numbers()
        expected = set(shapes_of(self.layout, self.num_basis))
        if set(tensors) != expected:
            raise IncompatiblePeerError(f"expected a snapshot of {', '.join(sorted(expected))}, found others")
        parameters, exp_avg, exp_avg_sq = (tensors[name] for name in _VECTORS)
        basis = tensors.get(_BASIS, torch.zeros(0))
        state = GradState(**found, parameters=parameters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, basis=basis)
        state.check(self.layout, self.vocab_rows, self.num_basis)
        return state

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """Returns what a state has to be, before it is fetched; IncompatiblePeerError if it cannot be taken up."""
        meta = check_meta(descriptor.meta)
        self.layout.require_same(meta.layout_digest, "the state to adopt")
        if meta.vocab_rows != self.vocab_rows:
            raise IncompatiblePeerError(
                f"expected a state of {self.vocab_rows} rows of vocabulary, found one of {meta.vocab_rows}"
            )
        shapes = shapes_of(self.layout, self.num_basis)
        expected = {name: ("float32", shape) for name, shape in shapes.items()}
        if {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors} != expected:
            raise IncompatiblePeerError(
                f"expected a state of {', '.join(expected)} over {self.layout.num_values} values, found other tensors "
                "or shapes"
            )
        return Expectation(max_bytes=12 * self.layout.num_values + 4 * self.num_basis, tensors=expected)


class SavedFlight(_Strict):
    """Gradients that were in a round under way; they go into the next one."""

    vector: Tensor  # [P] fp32.
    num_tokens: _Count
    num_micro_batches: _Count
    loss_sum: float


class SavedGrad(GradMeta):
    """A checkpoint's part: everything of the state but the parameters, which are saved as the model's."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    basis: Tensor
    residual: Tensor | None = None  # What this node's lossy encodings left out.
    flight: SavedFlight | None = None

    @staticmethod
    def values(state: GradState, **more: StateValue) -> dict[str, StateValue]:
        """Returns the values of a checkpoint; tensors are not copied."""
        numbers: dict[str, StateValue] = GradMeta.of(state).model_dump()
        vectors: dict[str, StateValue] = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        return {**numbers, **vectors, "basis": state.basis, **more}

    @classmethod
    def from_dict(cls, saved: Mapping[str, StateValue], layout: FlatLayout, num_basis: int) -> SavedGrad:
        """Checks every value of a checkpoint for a model of this layout, whose gradients travel on such a basis.

        Raises:
            CheckpointMismatchError: another version or model, or values that are missing or of another kind.
        """
        if saved.get("version") != 1 or saved.get("kind") != "grad":
            raise CheckpointMismatchError(
                f"expected the state of strategy grad, version 1, found {str(saved.get('kind'))[:20]}, version "
                f"{str(saved.get('version'))[:20]}; use the strategy the checkpoint was made with"
            )
        try:
            found = cls.model_validate(dict(saved))
        except ValidationError as error:
            raise CheckpointMismatchError(
                f"expected the state of strategy grad, found another: {first_problem(error)}"
            ) from error
        if found.layout_digest != layout.digest():
            raise CheckpointMismatchError(
                f"expected the state of this model (layout {layout.digest()[:12]}), found {found.layout_digest[:12]}; "
                "use the preset and vocabulary the checkpoint was made with"
            )
        if found.basis.shape != (num_basis,):
            raise CheckpointMismatchError(
                f"expected a basis of {num_basis} values for PowerSGD, found {list(found.basis.shape)}; use the "
                "collective.powersgd_rank that the checkpoint was made with"
            )
        flight = found.flight.vector if found.flight is not None else None
        of_round = Packing.of(layout).num_values
        for vector, num_values in (
            (found.exp_avg, layout.num_values),
            (found.exp_avg_sq, layout.num_values),
            (flight, layout.num_values),
            (found.residual, of_round),
            (found.basis, num_basis),
        ):
            if vector is not None and (vector.shape != (num_values,) or vector.dtype != torch.float32):
                raise CheckpointMismatchError(
                    f"expected vectors of {num_values} fp32 values, found {list(vector.shape)} {vector.dtype}"
                )
        return found

    def state(self, parameters: Tensor) -> GradState:
        """Returns the state with the model's parameters; its tensors are copies."""
        names = {each.name for each in fields(GradState)} - {*_VECTORS, "basis"}
        return GradState(
            **{name: getattr(self, name) for name in names},
            parameters=parameters,
            exp_avg=self.exp_avg.clone(),
            exp_avg_sq=self.exp_avg_sq.clone(),
            basis=self.basis.clone(),
        )
