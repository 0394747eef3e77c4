"""The state of a SPARTA replica: what it hands to a joiner, its form in a snapshot, and its part of a checkpoint.

Replicas differ a little, so a joiner takes one replica's state (parameters, AdamW's moments, counters; spec P-42) and
becomes its twin. Moments have no other use: the average of replicas' moments belongs to no replica. A checkpoint has
the counters alone; parameters and moments are saved beside it. A round under way begins again after loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.optim import Adam, Optimizer

from trainer.errors import CheckpointMismatchError, IncompatiblePeerError, TrainerUsageError
from trainer.network.transfer import Descriptor, Expectation
from trainer.network.transfer.descriptor import Meta
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.engine.strategy import StateValue, first_problem

_VECTORS = ("parameters", "exp_avg", "exp_avg_sq")
_STEPS = "steps"
_Count = Annotated[int, Field(ge=0, lt=2**48)]
"""No run gets as far; and beyond 2**53 a node could not announce its round."""
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpartaState:
    """One replica's state; tensors are on the CPU, and never changed."""

    round_index: int  # The next round.
    num_inner_steps: int  # Optimizer steps so far: where the schedule of a joiner begins.
    vocab_rows: int  # Rows of embedding and output; 0 for a stage with neither.
    layout_digest: str  # :meth:`FlatLayout.digest`.
    parameters: Tensor  # [P] fp32.
    exp_avg: Tensor  # [P] fp32, AdamW's.
    exp_avg_sq: Tensor  # [P] fp32, AdamW's; 0 or more.
    steps: Tensor  # [T] fp32, AdamW's steps of each tensor of the layout, whole numbers.

    def check(self, layout: FlatLayout, *, vocab_rows: int) -> None:
        """Refuses a state that does not belong to a model of this layout, or is not sound.

        Raises:
            IncompatiblePeerError: the message names the first thing that does not fit.
        """
        layout.require_same(self.layout_digest, "the state to adopt")
        if self.round_index < 0 or self.num_inner_steps < 0 or self.vocab_rows != vocab_rows:
            raise IncompatiblePeerError(
                f"expected round and step 0 or later and {vocab_rows} rows of vocabulary in the state to adopt, found "
                f"round {self.round_index}, step {self.num_inner_steps} and {self.vocab_rows} rows"
            )
        for name in _VECTORS:
            _check(getattr(self, name), layout.num_values, name)
        _check(self.steps, len(layout.names), _STEPS)
        if bool((self.exp_avg_sq < 0).any()):
            raise IncompatiblePeerError(
                "expected second moments of 0 or more in the state to adopt, found negative ones"
            )
        if bool((self.steps < 0).any()) or not torch.equal(self.steps, self.steps.round()):
            raise IncompatiblePeerError("expected whole numbers as steps of the state to adopt, found others")


def _check(tensor: Tensor, num_values: int, name: str) -> None:
    fits = tensor.shape == (num_values,) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    if not fits or not bool(torch.isfinite(tensor).all()):
        raise IncompatiblePeerError(
            f"expected {num_values} finite fp32 values on the CPU as {name} of the state to adopt, "
            f"found {list(tensor.shape)} {tensor.dtype}{' with values that are not finite' if fits else ''}"
        )


def check_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Raises TrainerUsageError for an optimizer that is no plain Adam or AdamW, or lacks a parameter."""
    if not isinstance(optimizer, Adam) or any(group.get("amsgrad") for group in optimizer.param_groups):
        raise TrainerUsageError(f"async_sparta: expected AdamW without amsgrad, found {type(optimizer).__name__}")
    groups = _group_of(optimizer)
    missing = [name for name, parameter in parameters.items() if id(parameter) not in groups]
    if missing:
        raise TrainerUsageError(
            f"async_sparta: expected an optimizer of all trainable parameters, found none for {missing[0]!r}"
        )


def gather_moments(layout: FlatLayout, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies the optimizer's moments and steps as `SpartaState` has them; zeros where it has taken no step yet."""
    exp_avg, exp_avg_sq = torch.zeros(layout.num_values), torch.zeros(layout.num_values)
    steps = torch.zeros(len(layout.names))
    for index, (name, shape, place) in enumerate(layout.slices()):
        state = optimizer.state.get(parameters[name])
        if state:
            exp_avg[place].view(shape).copy_(state["exp_avg"])
            exp_avg_sq[place].view(shape).copy_(state["exp_avg_sq"])
            steps[index] = float(state["step"])
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "steps": steps}


@torch.no_grad()
def install_moments(
    shared: SpartaState, layout: FlatLayout, parameters: Mapping[str, Tensor], optimizer: Optimizer
) -> None:
    """Replaces the optimizer's moments; the caller has checked them (`SpartaState.check`)."""
    groups = _group_of(optimizer)
    for index, (name, shape, place) in enumerate(layout.slices()):
        parameter = parameters[name]
        group = groups[id(parameter)]
        on_device = bool(group.get("fused") or group.get("capturable"))  # Where AdamW itself keeps its step count.
        first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
        first.copy_(shared.exp_avg[place].view(shape))
        second.copy_(shared.exp_avg_sq[place].view(shape))
        optimizer.state[parameter] = {
            "step": shared.steps[index].clone().to(parameter.device if on_device else "cpu"),
            "exp_avg": first,
            "exp_avg_sq": second,
        }


def _group_of(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Parameter groups by identity of the parameter."""
    return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SpartaMeta(_Strict):
    """A `SpartaState` without its tensors, as its descriptor has it."""

    kind: Literal["sparta"] = "sparta"
    version: Literal[1] = 1
    round_index: _Count
    num_inner_steps: _Count
    vocab_rows: _Count
    layout_digest: _Digest


def check_meta(meta: Mapping[str, Any]) -> SpartaMeta:
    """Reads what a descriptor says of a state; raises IncompatiblePeerError if it does not describe one."""
    try:
        return SpartaMeta.model_validate(dict(meta))
    except ValidationError as error:
        raise IncompatiblePeerError(
            f"expected the descriptor of a SPARTA state of version 1, found another: {first_problem(error)}"
        ) from error


@dataclass(frozen=True, slots=True)
class SpartaFit:
    """The form of a replica's state on the network side (a ``StateForm``): which states a node can take up."""

    layout: FlatLayout
    vocab_rows: int = 0

    def outer_step(self, shared: SpartaState) -> int:
        """Returns the state's round, by which `choose_recent_state` chooses."""
        return shared.round_index

    def pack(self, shared: SpartaState) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """Returns descriptor and tensors of a snapshot; None for first weights, which are the same at all nodes."""
        if not shared.num_inner_steps and not shared.round_index:
            return None
        meta = SpartaMeta(
            round_index=shared.round_index,
            num_inner_steps=shared.num_inner_steps,
            vocab_rows=shared.vocab_rows,
            layout_digest=shared.layout_digest,
        )
        return meta.model_dump(), {name: getattr(shared, name) for name in (*_VECTORS, _STEPS)}

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SpartaState:
        """Returns the state in a snapshot; raises IncompatiblePeerError if it is none, or does not fit."""
        found = check_meta(meta).model_dump(exclude={"kind", "version"})
        if set(tensors) != {*_VECTORS, _STEPS}:
            raise IncompatiblePeerError(f"expected a snapshot of {', '.join(_VECTORS)} and {_STEPS}, found others")
        shared = SpartaState(**{**found, **tensors})
        shared.check(self.layout, vocab_rows=self.vocab_rows)
        return shared

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """Returns what a state has to be, before it is fetched; IncompatiblePeerError if it cannot be taken up."""
        meta = check_meta(descriptor.meta)
        self.layout.require_same(meta.layout_digest, "the state to adopt")
        if meta.vocab_rows != self.vocab_rows:
            raise IncompatiblePeerError(
                f"expected a state of {self.vocab_rows} rows of vocabulary, found one of {meta.vocab_rows}"
            )
        vectors = dict.fromkeys(_VECTORS, ("float32", (self.layout.num_values,)))
        expected = {**vectors, _STEPS: ("float32", (len(self.layout.names),))}
        if {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors} != expected:
            raise IncompatiblePeerError(
                f"expected a state of {', '.join(expected)} over {self.layout.num_values} values, "
                f"found other tensors or shapes"
            )
        max_bytes = 12 * self.layout.num_values + 4 * len(self.layout.names)
        return Expectation(max_bytes=max_bytes, tensors=expected)


class SavedPendingWork(_Strict):
    """Batches of one slice that wait for a committed round, and Unix time of the oldest."""

    num_batches: _Count
    since_s: Annotated[float, Field(ge=0)]


class SavedSparta(_Strict):
    """Everything of a :class:`~trainer.outer.sparta.trainer.SpartaTrainer` but parameters, moments and options."""

    version: Literal[1] = 1
    schedule_digest: _Digest
    round_index: _Count
    reached: _Count
    failed_in_a_row: _Count
    failed_round: Annotated[int, Field(ge=-1, lt=2**48)]
    ghost_rounds_left: _Count
    behind: bool
    damaged: bool
    num_inner_steps: _Count
    steps_since_round: _Count
    begin_again: bool  # A round was under way, or due at once.
    progress: list[SavedPendingWork]  # By slice.

    @classmethod
    def from_dict(cls, saved: Mapping[str, StateValue], schedule_digest: str, num_slices: int) -> SavedSparta:
        """Checks every value of a checkpoint for this model and schedule.

        Raises:
            CheckpointMismatchError: another version, model or schedule, or values that are missing or of another kind.
        """
        if saved.get("version") != 1:
            raise CheckpointMismatchError(
                f"expected SPARTA state of version 1, found version {str(saved.get('version'))[:20]}"
            )
        try:
            found = cls.model_validate(dict(saved))
        except ValidationError as error:
            raise CheckpointMismatchError(f"expected a SPARTA state, found another: {first_problem(error)}") from error
        if found.schedule_digest != schedule_digest or len(found.progress) != num_slices:
            raise CheckpointMismatchError(
                f"expected SPARTA state of this model and schedule ({schedule_digest[:12]}), found "
                f"{found.schedule_digest[:12]}; use the model and the sparta options the checkpoint was made with"
            )
        if found.reached > found.round_index:
            raise CheckpointMismatchError(
                f"expected the SPARTA state's round {found.round_index} to be {found.reached} or later"
            )
        return found
