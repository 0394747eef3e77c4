"""Counts what a link costs and loses: bytes, ratio, reconstruction error, and an alarm when the error is too large.

The error is end to end: the activation against what the far end decodes, relative to its norm. Measuring it costs one
decoding, so it is done for every sixteenth activation. A subspace link in fp32 has 2e-8; an alarm means that the model
has left its subspace (a projection left out, another basis) or that values have outliers the packing cannot hold.
Gradients count in bytes only: what a subspace leaves out of them is not an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trainer.compression.activations.codec import ActivationCodec, Encoded
from trainer.errors import TrainerUsageError

__all__ = ["LinkFigures", "LinkMeter", "reconstruction_error"]

logger = logging.getLogger(__name__)

_EVERY = 16
_KEPT = 0.9
"""Weight of the old value in the moving average."""
_LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """A link's totals so far."""

    raw_bytes: int
    """Size in fp32 of what was encoded."""
    wire_bytes: int
    """Size of what was sent for it, ids not included."""
    num_tensors: int
    """Number of activations and gradients."""
    error: float
    """Relative reconstruction error of activations, a moving average; 0 before the first measurement."""
    max_error: float
    """The largest measured."""
    alarms: int
    """Measurements above the limit."""

    @property
    def ratio(self) -> float:
        """Compression ratio, raw over sent; 1 before anything was sent."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0


class LinkMeter:
    """Counts what one worker sends over one link. Thread-safe.

    Args:
        link: name in the log, such as ``head.0.42 → body-1``.
        codec: the link's.
        max_error: `SubspaceConfig.max_error`; the codec's rounding is added.
        every: measures every so many activations.
        clock: seconds.

    Raises:
        TrainerUsageError: a number is out of range.
    """

    def __init__(
        self,
        link: str,
        codec: ActivationCodec,
        max_error: float,
        *,
        every: int = _EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every < 1 or not max_error > 0:
            raise TrainerUsageError(f"expected every ≥ 1 and max_error > 0, found {every} and {max_error}")
        self._link = link
        self._codec = codec
        self._limit = max_error + codec.rounding
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._raw_bytes = self._wire_bytes = self._num_tensors = self._num_activations = self._alarms = 0
        self._error: float | None = None
        self._max_error = 0.0
        self._logged_at_s = -_LOG_INTERVAL_S

    def activation(self, activation: Tensor, ids: Tensor | None, encoded: Encoded) -> float | None:
        """Counts a sent activation.

        Args:
            activation: as it was encoded, [B, S, dim].
            ids: its tokens, if the codec needs them.
            encoded: what is sent.

        Returns:
            Its error, or None if it was not measured.
        """
        with self._lock:
            is_due = self._num_activations % self._every == 0
            self._num_activations += 1
        self._count(encoded)
        if not is_due:
            return None
        error = reconstruction_error(self._codec, activation, ids, encoded)
        self._note(error)
        return error

    def gradient(self, encoded: Encoded) -> None:
        """Counts a sent gradient."""
        self._count(encoded)

    def figures(self) -> LinkFigures:
        """Returns the link's totals so far."""
        with self._lock:
            return LinkFigures(
                raw_bytes=self._raw_bytes,
                wire_bytes=self._wire_bytes,
                num_tensors=self._num_tensors,
                error=self._error or 0.0,
                max_error=self._max_error,
                alarms=self._alarms,
            )

    def _count(self, encoded: Encoded) -> None:
        with self._lock:
            self._raw_bytes += encoded.raw_bytes
            self._wire_bytes += encoded.wire_bytes
            self._num_tensors += 1

    def _note(self, error: float) -> None:
        with self._lock:
            self._error = error if self._error is None else _KEPT * self._error + (1 - _KEPT) * error
            self._max_error = max(self._max_error, error)
            if error <= self._limit:
                return
            self._alarms += 1
            now_s = self._clock()
            is_quiet = now_s - self._logged_at_s < _LOG_INTERVAL_S
            self._logged_at_s = self._logged_at_s if is_quiet else now_s
            alarms = self._alarms
        if not is_quiet:
            logger.warning(
                "link %s (%s): expected a reconstruction error of at most %.2g, found %.2g (%d times so far); has the "
                "model left its subspace?",
                self._link,
                self._codec.name,
                self._limit,
                error,
                alarms,
            )


def reconstruction_error(codec: ActivationCodec, activation: Tensor, ids: Tensor | None, encoded: Encoded) -> float:
    """Returns ‖x − decoded‖ / ‖x‖ of one activation; 0 if both are 0."""
    wanted = activation.detach().to(codec.device).float()
    error = float((codec.decode(encoded.tensors, ids) - wanted).norm())
    norm = float(wanted.norm())
    return error / norm if norm else (0.0 if error == 0.0 else float("inf"))
