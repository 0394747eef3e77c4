"""A stage's state as values that ``torch.load(weights_only=True)`` takes, version 1.

Weights and accumulators are by parameter name, so that a state says what it is of. Whatever is read is checked before
the first tensor is replaced. The sums that accumulate are a fourth of a state (4 of 16 bytes a parameter), and none of
it in one taken right behind a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.errors import CheckpointMismatchError
from trainer.inner.optimizer import state_for
from trainer.pipeline.stage.results import Accumulated

__all__ = ["SavedStage", "read_saved", "to_saved"]

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedStage:
    """What a replica goes on from."""

    module: Mapping[str, Tensor]
    """Weights by name."""
    optimizer: Mapping[str, Any]
    sums: Mapping[str, Tensor]
    """Accumulated gradients by parameter; those that nothing has touched are not there."""
    accumulated: Accumulated
    version: int
    skipped_steps: int
    skipped_in_a_row: int
    norms: tuple[tuple[float, int], ...] = ()
    """Of the last micro-batches, with their tokens (`NormBound.seen`)."""


def to_saved(saved: SavedStage) -> dict[str, Any]:
    """Plain values; nothing is copied."""
    return {
        "version": _VERSION,
        "module": dict(saved.module),
        "optimizer": dict(saved.optimizer),
        "sums": dict(saved.sums),
        "num_tokens": saved.accumulated.num_tokens,
        "num_micro_batches": saved.accumulated.num_micro_batches,
        "loss_sum": saved.accumulated.loss_sum,
        "stage_version": saved.version,
        "skipped_steps": saved.skipped_steps,
        "skipped_in_a_row": saved.skipped_in_a_row,
        "norms": [list(each) for each in saved.norms],
    }


def read_saved(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> SavedStage:
    """The inverse of `to_saved`, for a stage that is there.

    Raises:
        CheckpointMismatchError: it is of another release, stage or model.
    """
    if state.get("version") != _VERSION:
        raise CheckpointMismatchError(
            f"expected stage state of version {_VERSION}, found {state.get('version')!r}; use the release that wrote it"
        )
    try:
        weights, sums = dict(state["module"]), dict(state["sums"])
        numbers = {name: _count(state[name], name) for name in ("num_tokens", "num_micro_batches")}
        counters = {name: _count(state[name], name) for name in ("stage_version", "skipped_steps", "skipped_in_a_row")}
        loss_sum = float(state["loss_sum"])
        norms = tuple(_norm(*each) for each in state.get("norms", ()))
        restored = state_for(optimizer, state["optimizer"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointMismatchError(f"expected the state of a stage, found another: {error!r}") from error
    if not math.isfinite(loss_sum):
        raise CheckpointMismatchError(f"expected a finite loss_sum in the state of a stage, found {loss_sum}")
    own = module.state_dict()
    _check_tensors(weights, own, "weights")
    if missing := sorted(own.keys() - weights.keys()):
        raise CheckpointMismatchError(f"expected the weight {missing[0]} in the state of a stage, found none")
    _check_tensors(sums, {name: value for name, value in module.named_parameters() if value.requires_grad}, "sums")
    return SavedStage(
        module=weights,
        optimizer=restored,
        sums=sums,
        accumulated=Accumulated(numbers["num_tokens"], numbers["num_micro_batches"], loss_sum),
        version=counters["stage_version"],
        skipped_steps=counters["skipped_steps"],
        skipped_in_a_row=counters["skipped_in_a_row"],
        norms=norms,
    )


def _count(value: object, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: expected a whole number of 0 or more, found {value!r}")
    return value


def _norm(norm: object, num_tokens: object) -> tuple[float, int]:
    if not isinstance(norm, float) or not math.isfinite(norm) or norm < 0 or _count(num_tokens, "norms") < 1:
        raise ValueError(f"norms: expected norms of 0 or more, each of a token or more, found {norm} of {num_tokens}")
    return norm, _count(num_tokens, "norms")


def _check_tensors(found: Mapping[str, Any], expected: Mapping[str, Tensor], what: str) -> None:
    for name, value in found.items():
        own = expected.get(name)
        if own is None:
            raise CheckpointMismatchError(f"{what} of a stage: expected none called {name}, found it; is it another's?")
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if shape != tuple(own.shape):
            raise CheckpointMismatchError(
                f"{what} of a stage, {name}: expected shape {tuple(own.shape)}, found {shape}; is it of another model?"
            )
