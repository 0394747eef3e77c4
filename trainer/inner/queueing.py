"""What keeps a GPU from waiting for the host: batches, the decision on a step, and times, all queued ahead.

A step's batches are copied from pinned memory on a stream of their own, as uint16 where the vocabulary allows it (a
quarter of the bytes), and widened on the device; that happens while the device still does the optimizer's step before.
Losses and gradient norm are copied to the host before clipping and optimizer are queued. So the host reads them while
the device goes on, and whether a step that is not finite is dropped is decided on the device, by the same values
(``found_inf``, as torch's GradScaler has it, which needs the fused AdamW). Events give the device's times without a
wait: those of the optimizer come a step late. On a CPU all of this is the plain thing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.model.loss import IGNORED_LABEL, filled_up

_NARROW_IDS: Final = (1 << 16) - 1
"""Ids below this fit uint16 beside the one that stands for labels that are left out."""
_IGNORED_NARROW: Final = _NARROW_IDS


class BatchMover:
    """Moves batches to the device ahead of their use.

    With ``num_rows`` a batch of fewer rows is filled up with rows whose labels do not count, since compiled code has
    one shape: the last batch of an epoch would be compiled again.
    """

    def __init__(self, device: torch.device, num_rows: int = 0) -> None:
        self._device = device
        self._num_rows = num_rows
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def moved(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns input ids and labels, int64[B, T], on the device; the work to come may use them at once."""
        ids, labels = filled_up(batch["input_ids"], batch["labels"], self._num_rows)
        if self._stream is None:
            return ids.to(self._device), labels.to(self._device)
        packed = narrowed(ids, labels).pin_memory()
        with torch.cuda.stream(self._stream):
            ids, labels = widened(packed.to(self._device, non_blocking=True))
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in (ids, labels):
            each.record_stream(current)
        return ids, labels


def narrowed(ids: Tensor, labels: Tensor) -> Tensor:
    """Returns ids and labels as one tensor [2, B, T]: uint16 where all of them fit, else int32."""
    both = torch.stack([ids, labels])
    if int(both.max()) >= _NARROW_IDS:
        return both.to(torch.int32)
    return both.masked_fill_(both == IGNORED_LABEL, _IGNORED_NARROW).to(torch.uint16)


def widened(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Reverses `narrowed`."""
    both = packed.to(torch.int64)
    if packed.dtype == torch.uint16:
        both[1].masked_fill_(both[1] == _IGNORED_NARROW, IGNORED_LABEL)
    return both[0], both[1]


class Readback:
    """Values on their way to the host; what is queued to the device afterwards does not delay them."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))

    def wait(self) -> list[float]:
        """Returns the values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._values.tolist()
        return found


def can_decide_on_device(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether the optimizer drops a step by a flag on the device, and it pays to let it."""
    return device.type == "cuda" and bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def apply_if(optimizer: Optimizer, is_good: Tensor) -> None:
    """Queues a step that changes nothing unless ``is_good``, a bool on the device."""
    optimizer.found_inf = (~is_good).to(torch.float32)  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


class StepClock:
    """Tells the seconds between points of a step: of the host on a CPU, of the device on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._optimizer: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def mark(self) -> float | torch.cuda.Event:
        """Returns this point: what was queued so far is done there."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
        """Returns the seconds between two points; waits until the device has come to the second."""
        if isinstance(first, float) or isinstance(second, float):
            return float(second) - float(first)  # type: ignore[arg-type]  # both are of one kind
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def optimizer_s(self, first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
        """Returns the optimizer's seconds: on a GPU of the step before, since that of this one may not be over."""
        if isinstance(first, float) or isinstance(second, float):
            return self.between(first, second)
        before, self._optimizer = self._optimizer, (first, second)
        return 0.0 if before is None else self.between(*before)
