"""`CheckpointContents`: the fields of a checkpoint (spec T-23), and those that make resuming exact.

The former keep their names and lie at the top of the file, so ``torch.load(path, weights_only=True)["layers"]`` is
the model's. The inner loop's state is split to that end: ``optimizer`` is AdamW's, ``schedule`` the rest of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from torch import Tensor

from trainer.errors import CheckpointMismatchError

__all__ = ["CheckpointContents"]

_VERSION: Final = 1
_OPTIONAL: Final = frozenset({"num_ids"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContents:
    """Everything a node goes on from: tensors, and plain values that ``weights_only`` takes."""

    layer_ids: tuple[int, ...]
    """Layers this node holds."""
    architecture: Mapping[str, Any]
    """The model's configuration; the saved one wins when the node starts again."""
    layers: Mapping[str, Mapping[str, Tensor]]
    """Parameters by stage or layer, then by name."""
    optimizer: Mapping[str, Any]
    """AdamW's state: `InnerLoop.state_dict` has it under ``optimizer``."""
    diloco: Mapping[str, Any]
    """Anchor, outer momentum, where within the inner steps; empty without DiLoCo."""
    training_rounds: int
    """Steps taken: names the file."""
    current_loss: float
    """Of the latest step."""
    timestamp: float
    """Seconds since 1970."""
    loader: Mapping[str, Any]
    """Where the data stream stands."""
    rng: Mapping[str, Any]
    """Of `rng_state`."""
    config: Mapping[str, Any]
    """The run's resolved configuration."""
    schedule: Mapping[str, Any]
    """The inner loop's state without ``optimizer``: step index, steps dropped."""
    num_ids: int | None = None
    """Ids of the vocabulary that losses are over; None in the checkpoints of releases that did not say."""
    version: int = _VERSION
    """Of these fields."""

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name; nothing is copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The contents that `to_mapping` gave.

        Raises:
            CheckpointMismatchError: fields are missing or unknown, or another release wrote them.
        """
        if mapping.get("version") != _VERSION:
            raise CheckpointMismatchError(
                f"expected a checkpoint of version {_VERSION}, found {mapping.get('version')!r}; "
                "use the release that wrote it"
            )
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - set(mapping) - _OPTIONAL), sorted(set(mapping) - names)
        if missing or unknown:
            raise CheckpointMismatchError(
                f"expected the fields of a checkpoint, found {missing or 'none'} missing, {unknown or 'none'} unknown"
            )
        return cls(**mapping)

    def inner_state(self) -> dict[str, Any]:
        """What `InnerLoop.load_state_dict` takes."""
        return {**self.schedule, "optimizer": self.optimizer}
