"""Shared states as the network side hands them out and fetches them: as a snapshot and back, and which states fit.

Anybody can announce a state. Its descriptor (some KB) says how many rows of vocabulary it has and how its values lie;
everything else follows from the architecture. So a state that does not fit costs neither disk nor memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from manifests import FIRST_MERGE_ID, MAX_VOCABULARY
from trainer.errors import IncompatiblePeerError
from trainer.model import VOCAB_STEP, ModelConfig, Transformer, rows_for
from trainer.network.transfer import Descriptor, Expectation
from trainer.network.transfer.descriptor import Meta
from trainer.outer.diloco import FlatLayout, FragmentPlan, SharedState, synchronised_parameters
from trainer.outer.grad import GradFit

S = TypeVar("S")

_NUMBERS = ("outer_step", "fragment", "num_inner_steps", "vocab_rows")
_NUMBER_LIMIT = 2**48  # No run gets as far; and beyond 2**53 a node could not announce where it stands.
_VECTORS = ("anchor", "momentum", "reference")
_BASIS = "basis."  # Of PowerSGD; the number of its fragment follows.
_MOST_BASIS_DIGITS = 4
_FEWEST_ROWS, _MOST_ROWS = rows_for(FIRST_MERGE_ID), rows_for(MAX_VOCABULARY)


class StateForm(Protocol[S]):
    """The form of one kind of shared state: DiLoCo's of a whole model or of a stage, or that of SPARTA's replicas."""

    def outer_step(self, shared: S) -> int:
        """Returns the outer step, as announced."""

    def pack(self, shared: S) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """Returns a snapshot's metadata and tensors; None where others are not to have it."""

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """Returns what a state of this descriptor has to be; raises `IncompatiblePeerError` where it does not fit."""

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> S:
        """Returns the state a snapshot holds; raises `IncompatiblePeerError` where it holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMeta:
    """A `trainer.outer.diloco.SharedState` without its vectors."""

    outer_step: int
    fragment: int
    num_inner_steps: int
    vocab_rows: int
    layout_digest: str


class DilocoStates:
    """DiLoCo's part of a `StateForm`; subclasses that know the model say what fits (`expectation`)."""

    __slots__ = ()

    def outer_step(self, shared: SharedState) -> int:
        """See `StateForm`."""
        return shared.outer_step

    def pack(self, shared: SharedState) -> tuple[Meta, Mapping[str, Tensor]] | None:
        """See `StateForm`; first weights have no vote, or two newcomers would outvote the one node that has trained."""
        if not shared.outer_step and not shared.fragment:
            return None
        meta: dict[str, int | str] = {name: int(getattr(shared, name)) for name in _NUMBERS}
        meta |= {"version": 1, "layout_digest": shared.layout_digest}
        bases = {f"{_BASIS}{index}": basis for index, basis in shared.bases.items()}
        return meta, {name: getattr(shared, name) for name in _VECTORS} | bases

    def unpack(self, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SharedState:
        """See `StateForm`."""
        checked = check_meta(meta)
        bases = {name: tensor for name, tensor in tensors.items() if _basis_index(name) is not None}
        if tensors.keys() - bases.keys() != set(_VECTORS):
            raise IncompatiblePeerError(f"expected a snapshot of {', '.join(_VECTORS)}, found {len(tensors)} others")
        anchor, momentum, reference = (tensors[name] for name in _VECTORS)
        return SharedState(
            **asdict(checked),
            anchor=anchor,
            momentum=momentum,
            reference=reference,
            bases={int(name.removeprefix(_BASIS)): basis for name, basis in bases.items()},
        )


def check_meta(meta: Mapping[str, Any]) -> SharedMeta:
    """Reads what a descriptor says of a shared state; raises `IncompatiblePeerError` where it is of none."""
    layout_digest = meta.get("layout_digest")
    if meta.get("version") != 1 or not isinstance(layout_digest, str):
        raise IncompatiblePeerError(
            f"expected the descriptor of a shared state of version 1, found version {str(meta.get('version'))[:20]}"
        )
    for name in _NUMBERS:
        value = meta.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _NUMBER_LIMIT:
            raise IncompatiblePeerError(
                f"the state's {name}: expected a number from 0 and under {_NUMBER_LIMIT}, found {str(value)[:40]}"
            )
    return SharedMeta(**{name: meta[name] for name in _NUMBERS}, layout_digest=layout_digest)


def _basis_index(name: str) -> int | None:
    """The fragment that a tensor is the basis of, if it is one."""
    digits = name.removeprefix(_BASIS) if name.startswith(_BASIS) else ""
    return int(digits) if digits.isdecimal() and len(digits) <= _MOST_BASIS_DIGITS else None


def check_vectors(descriptor: Descriptor, num_values: int, *, max_bytes: int) -> Expectation:
    """Returns what a state of so many values is; raises `IncompatiblePeerError` where its descriptor says otherwise.

    Bases of PowerSGD may come with it, which together have half as many values at most.
    """
    expected: dict[str, tuple[str, tuple[int, ...]]] = dict.fromkeys(_VECTORS, ("float32", (num_values,)))
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in descriptor.tensors}
    bases = {name: form for name, form in found.items() if _basis_index(name) is not None}
    if 2 * sum(math.prod(shape) for _, shape in bases.values()) <= num_values:
        expected |= {name: ("float32", (math.prod(shape),)) for name, (_, shape) in bases.items()}
    if found != expected:
        named = [f"{name[:32]!r} {dtype} {list(shape)}" for name, (dtype, shape) in found.items()]
        text = ", ".join(named[: len(_VECTORS)] + ["…"] * (len(named) > len(_VECTORS))) or "none"
        raise IncompatiblePeerError(
            f"expected a state of {', '.join(_VECTORS)} with {num_values} fp32 values each, found {text}"
        )
    return Expectation(max_bytes=max_bytes, tensors=expected)


def state_layout(shape: ModelConfig, num_fragments: int) -> FlatLayout:
    """Returns which value of a shared state belongs to which parameter, for a model of this shape."""
    with torch.device("meta"):
        model = Transformer(shape)
    return FragmentPlan.of(synchronised_parameters(model), num_fragments).whole()


def grad_fit(shape: ModelConfig, powersgd_rank: int) -> GradFit:
    """Returns the form of a whole model's state under averaged gradients; its vocabulary does not grow."""
    with torch.device("meta"):
        model = Transformer(shape)
    return GradFit.of(FlatLayout.of(synchronised_parameters(model)), shape.vocab_size, powersgd_rank)


@dataclass(frozen=True, slots=True)
class StateFit(DilocoStates):
    """The form of a whole model's state, and which states, of any number of rows, a node can take up."""

    shape: ModelConfig
    num_fragments: int
    max_bytes: int

    def expectation(self, descriptor: Descriptor) -> Expectation:
        """See `StateForm`; the message of a refusal names the first difference."""
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
