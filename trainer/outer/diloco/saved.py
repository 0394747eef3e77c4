"""DiLoCo's part of a checkpoint: plain values and tensors, so that ``torch.load(weights_only=True)`` reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from trainer.errors import CheckpointMismatchError
from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.diloco.fragments import FragmentPlan
from trainer.outer.diloco.state import FragmentState, ReplicaState
from trainer.outer.engine.strategy import StateValue

__all__ = ["SavedDiLoCo", "SavedFlight"]

_VERSION = 1
_VECTORS = ("anchor", "momentum", "reference")
K = TypeVar("K")


@dataclass(frozen=True, slots=True, eq=False)
class SavedFlight:
    """A round that was under way, as far as it has to be begun again.

    Args:
        vector: the contribution, [P] fp32.
        num_batches: batches in it.
        age_s: their age when it was made.
        steps_left: inner steps until its result is merged.
        progress: share of the round's intended work that is in it.
    """

    vector: Tensor
    num_batches: int
    age_s: float
    steps_left: int
    progress: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedDiLoCo:
    """Everything of a :class:`~trainer.outer.diloco.trainer.DiLoCoTrainer` that is not a parameter or an option."""

    layout_digest: str
    state: ReplicaState
    steps_since_round: int
    progress: tuple[tuple[int, float, int], ...]
    """Batches, Unix time of the oldest and inner steps, by fragment."""
    flight: SavedFlight | None

    def to_dict(self) -> dict[str, StateValue]:
        """As a checkpoint holds it; the vectors are not copied."""
        fragments: list[StateValue] = [
            {
                "anchor": fragment.anchor,
                "momentum": fragment.momentum,
                "reference": fragment.reference,
                "residual": fragment.residual,
                "num_batches": num_batches,
                "since_s": since_s,
                "num_steps": num_steps,
            }
            for fragment, (num_batches, since_s, num_steps) in zip(self.state.fragments, self.progress, strict=True)
        ]
        flight: StateValue = None
        if self.flight is not None:
            flight = {
                "vector": self.flight.vector,
                "num_batches": self.flight.num_batches,
                "age_s": self.flight.age_s,
                "steps_left": self.flight.steps_left,
                "progress": self.flight.progress,
            }
        return {
            "version": _VERSION,
            "layout_digest": self.layout_digest,
            "round_index": self.state.round_index,
            "outer_step": self.state.outer_step,
            "num_inner_steps": self.state.num_inner_steps,
            "vocab_rows": self.state.vocab_rows,
            "inner_step": self.steps_since_round,
            "fragments": fragments,
            "flight": flight,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, StateValue], plan: FragmentPlan) -> SavedDiLoCo:
        """What a checkpoint holds, with every value checked.

        Args:
            saved: from :meth:`to_dict`, perhaps of another process.
            plan: of the model it is to be loaded for.

        Raises:
            CheckpointMismatchError: another version, another model, or values that are missing or of another kind.
        """
        version = _take(saved, "version", _integer)
        if version != _VERSION:
            raise CheckpointMismatchError(f"expected DiLoCo state of version {_VERSION}, found version {version}")
        layout_digest = _take(saved, "layout_digest", _text)
        if layout_digest != plan.digest():
            raise CheckpointMismatchError(
                f"expected DiLoCo state of this model (layout {plan.digest()[:12]}), found {layout_digest[:12]}; "
                "use the preset, vocabulary and diloco.num_fragments the checkpoint was made with"
            )
        entries = _take(saved, "fragments", _list)
        if len(entries) != len(plan.layouts):
            raise CheckpointMismatchError(f"expected {len(plan.layouts)} fragments, found {len(entries)}")
        fragments = [_mapping(entry) for entry in entries]
        state = ReplicaState(
            round_index=_take(saved, "round_index", _integer),
            num_inner_steps=_take(saved, "num_inner_steps", _integer),
            vocab_rows=_take(saved, "vocab_rows", _integer),
            fragments=tuple(_fragment(entry, layout) for entry, layout in zip(fragments, plan.layouts, strict=True)),
        )
        flight = saved.get("flight")
        steps_since_round = _take(saved, "inner_step", _integer)
        return cls(
            layout_digest=layout_digest,
            state=state,
            steps_since_round=steps_since_round,
            progress=tuple(
                (
                    _take(entry, "num_batches", _integer),
                    _take(entry, "since_s", _number),
                    _integer(entry.get("num_steps", steps_since_round)),  # Older checkpoints do not say.
                )
                for entry in fragments
            ),
            flight=None if flight is None else _flight(_mapping(flight), plan.layouts[state.fragment]),
        )


def _fragment(entry: Mapping[str, StateValue], layout: FlatLayout) -> FragmentState:
    anchor, momentum, reference = (_vector(entry, name, layout) for name in _VECTORS)
    residual = None if entry.get("residual") is None else _vector(entry, "residual", layout)
    return FragmentState(anchor, momentum, reference, residual)


def _flight(entry: Mapping[str, StateValue], layout: FlatLayout) -> SavedFlight:
    return SavedFlight(
        _vector(entry, "vector", layout),
        _take(entry, "num_batches", _integer),
        _take(entry, "age_s", _number),
        _take(entry, "steps_left", _integer),
        min(1.0, max(0.0, _number(entry.get("progress", 1.0)))),
    )


def _vector(entry: Mapping[str, StateValue], name: str, layout: FlatLayout) -> Tensor:
    """A copy, so that what the caller does with the checkpoint afterwards changes nothing here."""
    vector = entry.get(name)
    if not isinstance(vector, Tensor) or vector.shape != (layout.num_values,) or vector.dtype != torch.float32:
        raise CheckpointMismatchError(
            f"expected {name} as [{layout.num_values}] fp32 in the DiLoCo state, found another"
        )
    return vector.detach().to("cpu", copy=True)


def _take(entry: Mapping[str, StateValue], name: str, kind: Callable[[StateValue], K]) -> K:
    if name not in entry:
        raise CheckpointMismatchError(f"expected {name!r} in the DiLoCo state, found only {sorted(entry)}")
    return kind(entry[name])


def _integer(value: StateValue) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointMismatchError(f"expected a count in the DiLoCo state, found {value!r:.40}")
    return value


def _number(value: StateValue) -> float:
    if not isinstance(value, int | float):
        raise CheckpointMismatchError(f"expected a number in the DiLoCo state, found {type(value).__name__}")
    return float(value)


def _text(value: StateValue) -> str:
    if not isinstance(value, str):
        raise CheckpointMismatchError(f"expected text in the DiLoCo state, found {type(value).__name__}")
    return value


def _list(value: StateValue) -> list[StateValue]:
    if not isinstance(value, list):
        raise CheckpointMismatchError(f"expected a list in the DiLoCo state, found {type(value).__name__}")
    return value


def _mapping(value: StateValue) -> dict[str, StateValue]:
    if not isinstance(value, dict):
        raise CheckpointMismatchError(f"expected a mapping in the DiLoCo state, found {type(value).__name__}")
    return value
