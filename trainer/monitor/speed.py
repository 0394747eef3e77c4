"""How fast a node trains and what its time goes to, over its latest 50 steps.

The training thread adds the seconds of each phase and closes each step; any thread asks for the `SpeedStatus`. Model
FLOPs utilisation relates the FLOPs that the model needs to the peak of the devices: what is computed twice counts as
time, never as work. On a GPU compute and optimizer are the device's seconds, which may overlap with the host's waiting
for data: what the shares leave of 1 is ``other``, never below 0.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from trainer.monitor.status import SpeedStatus

Phase = Literal["data", "compute", "optimizer", "outer_step", "checkpoint"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
_WINDOW_STEPS: Final = 50


@dataclass(frozen=True, slots=True)
class Peak:
    """The FLOP/s that a device can do at best, and how that is known."""

    flops_per_s: float
    kind: Literal["stated", "measured"]
    device: str  # Its name, and the type of the products.


@dataclass(frozen=True, slots=True)
class _Mark:
    """The end of a step: when it was, and the sums up to it."""

    at_s: float
    num_tokens: int
    seconds: tuple[float, ...]  # By phase, in the order of PHASES.


class SpeedMeter:
    """Adds up the phases of steps; thread safe.

    Tokens are those of all ``num_devices`` of the node, each of which has the ``peak``; seconds are those of the one
    that asks. ``clock`` is in seconds.
    """

    def __init__(
        self,
        flops_per_token: int,
        peak: Peak,
        clock: Callable[[], float] = time.perf_counter,
        *,
        num_devices: int = 1,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak = peak
        self._num_devices = num_devices
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._num_tokens = 0
        self._marks: deque[_Mark] = deque(maxlen=_WINDOW_STEPS + 1)

    def add(self, phase: Phase, seconds: float) -> None:
        """Adds seconds to a phase of the step under way."""
        self._seconds[phase] += seconds

    def end_step(self, num_tokens: int = 0) -> None:
        """Closes a step of so many tokens; to be called with none once before the first, when its time begins."""
        self._num_tokens += num_tokens
        mark = _Mark(self._clock(), self._num_tokens, tuple(self._seconds.values()))
        with self._lock:
            self._marks.append(mark)

    def restart(self) -> None:
        """Forgets all steps so far: warm-up, when steps are measured."""
        with self._lock:
            self._marks.clear()

    def status(self) -> SpeedStatus | None:
        """Returns the speed over the latest steps; None before a step has ended."""
        with self._lock:
            if len(self._marks) < 2:
                return None
            first, last = self._marks[0], self._marks[-1]
        seconds = last.at_s - first.at_s
        if seconds <= 0:
            return None
        tokens_per_s = (last.num_tokens - first.num_tokens) / seconds
        spent = (after - before for before, after in zip(first.seconds, last.seconds, strict=True))
        shares: dict[str, float] = {phase: round(each / seconds, 4) for phase, each in zip(PHASES, spent, strict=True)}
        return SpeedStatus(
            tokens_per_s=round(tokens_per_s, 1),
            tokens_per_s_per_device=round(tokens_per_s / self._num_devices, 1),
            num_devices=self._num_devices,
            mfu=round(tokens_per_s * self._flops_per_token / (self._num_devices * self._peak.flops_per_s), 4),
            flops_per_token=self._flops_per_token,
            peak_flops_per_s=self._peak.flops_per_s,
            peak_kind=self._peak.kind,
            peak_device=self._peak.device,
            time_shares={**shares, "other": round(max(0.0, 1.0 - sum(shares.values())), 4)},
        )


def speed_text(speed: SpeedStatus) -> str:
    """Returns utilisation and the shares of time in one line."""
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f}" for name, share in speed.time_shares.items())
    peak = f"{speed.peak_flops_per_s / 1e12:.3g} TFLOP/s {speed.peak_kind}"
    of_all = f"{speed.num_devices} x " if speed.num_devices > 1 else ""
    each = f"{speed.tokens_per_s_per_device:,.0f} a device  " if speed.num_devices > 1 else ""
    return f"{each}MFU {100 * speed.mfu:.1f} % of {of_all}{peak} ({shares} %)"
