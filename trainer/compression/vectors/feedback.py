"""Error feedback: what an encoding left unsaid is added to what is said next.

Kept as a transaction, because a round may fail: ``compensate`` only adds, ``commit`` alone replaces the residual, and
``rollback`` leaves everything as it was before ``compensate``. After k committed rounds the sum of what the others
decoded differs from the sum of what was meant by one residual, not by k of them.

Costs one fp32 vector of memory and two passes over it a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from trainer.compression.vectors.codec import check_vector
from trainer.errors import CheckpointMismatchError, CodecError, TrainerUsageError

__all__ = ["ErrorFeedback"]

_VERSION: Final = 1


class ErrorFeedback:
    """The residual of one vector that is sent again and again.

    Args:
        num_values: length of the vector.
    """

    def __init__(self, num_values: int) -> None:
        self._residual = torch.zeros(num_values)
        self._open = False

    @property
    def residual(self) -> Tensor:
        """fp32[num_values], what is still unsaid; to be read only."""
        return self._residual

    def compensate(self, vector: Tensor, out: Tensor | None = None) -> Tensor:
        """What to encode instead of ``vector``; opens the transaction.

        Args:
            vector: fp32[num_values], what is meant.
            out: written and returned instead of a new vector; may be ``vector``.

        Returns:
            ``vector`` plus the residual.

        Raises:
            TrainerUsageError: the last transaction is still open.
            CodecError: ``vector`` has another length or type.
        """
        if self._open:
            raise TrainerUsageError("expected commit() or rollback() before the next compensate(), found neither")
        self._check(vector)
        self._open = True
        return torch.add(vector, self._residual, out=out)

    def commit(self, compensated: Tensor, decoded: Tensor) -> None:
        """Keep what was not said; ends the transaction.

        Args:
            compensated: what ``compensate`` returned.
            decoded: what the others took for it; zeros where nothing arrived, so that it is said again.

        Raises:
            TrainerUsageError: no transaction is open.
            CodecError: a vector has another length or type, or their difference is not finite; nothing changed.
        """
        if not self._open:
            raise TrainerUsageError("expected compensate() before commit(), found no open round")
        self._check(compensated)
        self._check(decoded)
        left = torch.sub(compensated, decoded)
        if not bool(torch.isfinite(left).all()):
            raise CodecError("expected a finite residual, found NaN or infinity; roll the round back")
        self._residual = left
        self._open = False

    def rollback(self) -> None:
        """Forget the round: the residual is what it was before. Without an open transaction nothing happens."""
        self._open = False

    def state_dict(self) -> dict[str, int | Tensor]:
        """The residual as of the last commit, for a checkpoint (a copy)."""
        return {"version": _VERSION, "residual": self._residual.clone()}

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        """Go on from a checkpoint; an open transaction is forgotten.

        Raises:
            CheckpointMismatchError: it is of another version or another length.
        """
        residual = state.get("residual")
        if state.get("version") != _VERSION or not isinstance(residual, Tensor):
            raise CheckpointMismatchError(
                f"error feedback: expected version {_VERSION} with a residual, found version {state.get('version')!r}"
            )
        if residual.shape != self._residual.shape or residual.dtype != torch.float32:
            raise CheckpointMismatchError(
                f"error feedback: expected a residual of {self._residual.numel()} fp32 values, found "
                f"{residual.dtype} of shape {tuple(residual.shape)}"
            )
        self._residual = residual.detach().clone()
        self._open = False

    def _check(self, vector: Tensor) -> None:
        check_vector(vector)
        if vector.numel() != self._residual.numel():
            raise CodecError(f"expected {self._residual.numel()} values, found {vector.numel()}")
