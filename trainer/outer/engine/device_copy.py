"""Copies between a GPU and host memory that training does not wait for.

Vectors cross in pieces through two pinned buffers of 64 MB, on a stream of their own: while one piece crosses, the
processor copies the one before out of its buffer, or the one behind into its. So whatever the model's size 128 MB are
pinned, which the system cannot page and takes a second a gigabyte to pin. The calling thread waits; kernels that are
queued meanwhile do not. For a CPU the same calls copy without streams, which is how the tests go through the pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

_PIECE_VALUES: Final = 1 << 24
"""A power of two, to which torch rounds pinned memory up."""

Parts = Sequence[tuple[slice, Tensor]]
"""Places in a vector, and the flat tensors of as many values, on the device, that belong there."""


def has_room(device: torch.device, size_bytes: int) -> bool:
    """Returns whether so many bytes can be held for a while beside steps that take what the largest so far took."""
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    used_bytes = torch.cuda.memory_allocated(device)
    unused_bytes = torch.cuda.memory_reserved(device) - used_bytes
    growth_bytes = torch.cuda.max_memory_allocated(device) - used_bytes
    return size_bytes + growth_bytes <= free_bytes + unused_bytes


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event behind all that was queued to the calling thread's stream of the device; None for a CPU."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # Who waits takes no core.
        event.record()
    return event


class PinnedPieces:
    """The two buffers and the stream of one device; for any thread, one transfer at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffers: list[Tensor] = []
        self._lock = threading.Lock()

    @torch.no_grad()
    def to_host(self, parts: Parts, vector: Tensor, ready: torch.cuda.Event | None) -> None:
        """Copies tensors to their places in a vector, fp32 on the CPU, once ``ready`` (`mark`) has come."""
        with self._lock, self._on_stream(ready):
            waiting: tuple[int, Tensor, torch.cuda.Event | None] | None = None
            for number, (start, piece) in enumerate(_pieces(parts)):
                buffer = self._buffer(number)[: piece.numel()]
                buffer.copy_(piece, non_blocking=True)
                if waiting is not None:
                    _empty(*waiting, vector)
                waiting = start, buffer, mark(self._device)
            if waiting is not None:
                _empty(*waiting, vector)

    @torch.no_grad()
    def to_device(self, vector: Tensor, parts: Parts, ready: torch.cuda.Event | None) -> None:
        """Copies from places in a vector, fp32 on the CPU, into tensors; all of it is there when this returns."""
        with self._lock, self._on_stream(ready):
            crossing: list[torch.cuda.Event | None] = [None, None]
            for number, (start, piece) in enumerate(_pieces(parts)):
                _wait(crossing[number % 2])
                buffer = self._buffer(number)[: piece.numel()]
                buffer.copy_(vector[start : start + piece.numel()])
                piece.copy_(buffer, non_blocking=True)
                crossing[number % 2] = mark(self._device)
            for event in crossing:
                _wait(event)

    def _on_stream(self, ready: torch.cuda.Event | None) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if ready is not None:
            self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def _buffer(self, number: int) -> Tensor:
        if not self._buffers:
            pinned = self._stream is not None
            self._buffers = [torch.empty(_PIECE_VALUES, pin_memory=pinned) for _ in range(2)]
        return self._buffers[number % 2]


def _pieces(parts: Parts) -> Iterator[tuple[int, Tensor]]:
    """Yields where in the vector each piece begins, and the piece."""
    for place, flat in parts:
        for start in range(0, flat.numel(), _PIECE_VALUES):
            yield place.start + start, flat[start : start + _PIECE_VALUES]


def _empty(start: int, buffer: Tensor, event: torch.cuda.Event | None, vector: Tensor) -> None:
    _wait(event)
    vector[start : start + buffer.numel()].copy_(buffer)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
