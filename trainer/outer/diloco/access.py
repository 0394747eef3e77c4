"""Where a strategy reads and sets a model's parameters, and how little of that the training thread has to do.

With rounds in the background the training thread does two things: it takes a snapshot of the parameters, and later it
merges, ``parameters ← keep·parameters + values``. On a CPU these are one copy, into memory that is kept for the next
round, and one pass over the parameters. On a GPU both are kernels queued behind those of the step: a copy on the
device, and a merge with values that are there already; the round's thread carries them to and from the host. That takes
4 bytes a parameter of device memory at either end; where there is no room for them, training waits for the transfer.

Each product and sum of a merge is rounded by itself, so that a parameter comes out the same wherever it lies in a
vector, and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from trainer.outer.diloco.flat import FlatLayout
from trainer.outer.engine.device_copy import Parts, PinnedPieces, has_room, mark

_BLOCK_VALUES: Final = 1 << 20  # Stays in the cache between the product and the sum; smaller ones keep threads waiting.
_VALUE_BYTES: Final = 4

Merge = Callable[[float], None]
"""Does ``parameters ← keep·parameters + values`` with the ``keep`` it is given; 0 sets the parameters to the values."""


class Snapshot(Protocol):
    """The parameters as they were at one moment."""

    def subtracted_from(self, anchor: Tensor) -> Tensor:
        """Returns a new vector ``anchor − parameters``; for any thread, once."""


class ParameterAccess(Protocol):
    """Where a strategy reads and sets a model's parameters, which may lie in parts at several processes.

    All but what a snapshot returns and `prepare_merge` is for the training thread.
    """

    def gather(self, layout: FlatLayout) -> Tensor:
        """Returns the parameters' present values as a vector of their own, as `FlatLayout.gather` does."""

    def scatter(self, layout: FlatLayout, vector: Tensor) -> None:
        """Sets the parameters to a vector's values, as `FlatLayout.scatter` does."""

    def snapshot(self, layout: FlatLayout) -> Snapshot:
        """Takes the parameters' present values, which are good until the next snapshot."""

    def prepare_merge(self, layout: FlatLayout, values: Tensor) -> Merge:
        """Brings a vector to where the parameters lie, in any thread; what it returns is for the training thread."""


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """A snapshot that is in host memory already; a vector that ``is_free`` is written over."""

    vector: Tensor
    is_free: bool = True

    def subtracted_from(self, anchor: Tensor) -> Tensor:
        """See `Snapshot`."""
        return torch.sub(anchor, self.vector, out=self.vector if self.is_free else torch.empty_like(anchor))


class ModelParameters:
    """The parameters of a model that lies in this process alone."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._kept = torch.empty(0)

    def gather(self, layout: FlatLayout) -> Tensor:
        """See `ParameterAccess`."""
        return layout.gather(self._tensors)

    def scatter(self, layout: FlatLayout, vector: Tensor) -> None:
        """See `ParameterAccess`."""
        layout.scatter(vector, self._tensors)

    def snapshot(self, layout: FlatLayout) -> Snapshot:
        """See `ParameterAccess`."""
        if self._kept.numel() < layout.num_values:
            self._kept = torch.empty(layout.num_values)
        return HostSnapshot(layout.gather(self._tensors, out=self._kept[: layout.num_values]), is_free=False)

    def prepare_merge(self, layout: FlatLayout, values: Tensor) -> Merge:
        """See `ParameterAccess`."""
        return partial(self._merge, layout, values)

    def _merge(self, layout: FlatLayout, values: Tensor, keep: float) -> None:
        layout.check_vector(values)
        for place, tensor in layout.places(self._tensors):
            merge_into(tensor, values[place].view(tensor.shape).to(tensor.device), keep)


class DeviceParameters:
    """The same on a GPU, for contiguous tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device
        self._pieces = PinnedPieces(device)

    def gather(self, layout: FlatLayout) -> Tensor:
        """See `ParameterAccess`."""
        vector = torch.empty(layout.num_values)
        self._pieces.to_host(self._parts(layout), vector, mark(self._device))
        return vector

    def scatter(self, layout: FlatLayout, vector: Tensor) -> None:
        """See `ParameterAccess`."""
        layout.check_vector(vector)
        self._pieces.to_device(vector, self._parts(layout), mark(self._device))

    def snapshot(self, layout: FlatLayout) -> Snapshot:
        """See `ParameterAccess`."""
        parts = self._parts(layout)
        if has_room(self._device, sum(part.nbytes for _, part in parts)):
            try:
                copies = [(place, part.clone()) for place, part in parts]
            except torch.OutOfMemoryError:  # Free, but not in one piece.
                copies = []
            if copies:
                return _DeviceSnapshot(self._pieces, copies, mark(self._device))
        return HostSnapshot(self.gather(layout))

    def prepare_merge(self, layout: FlatLayout, values: Tensor) -> Merge:
        """See `ParameterAccess`."""
        layout.check_vector(values)
        if has_room(self._device, _VALUE_BYTES * layout.num_values):
            try:
                there = torch.empty(layout.num_values, device=self._device)
            except torch.OutOfMemoryError:
                there = values
            if there is not values:
                self._pieces.to_device(values, [(slice(0, layout.num_values), there)], mark(self._device))
                return partial(self._merge, layout, there)
        return partial(self._merge, layout, values)

    def _merge(self, layout: FlatLayout, values: Tensor, keep: float) -> None:
        for place, tensor in layout.places(self._tensors):
            merge_into(tensor, values[place].view(tensor.shape).to(self._device), keep)

    def _parts(self, layout: FlatLayout) -> Parts:
        return [(place, tensor.view(-1)) for place, tensor in layout.places(self._tensors)]


class _DeviceSnapshot:
    """Copies on the device, which are let go of as soon as they are on the host."""

    def __init__(self, pieces: PinnedPieces, copies: Parts, ready: torch.cuda.Event | None) -> None:
        self._pieces = pieces
        self._copies = copies
        self._ready = ready

    def subtracted_from(self, anchor: Tensor) -> Tensor:
        """See `Snapshot`."""
        copies, self._copies = self._copies, ()
        vector = torch.empty_like(anchor)
        self._pieces.to_host(copies, vector, self._ready)
        return torch.sub(anchor, vector, out=vector)


def access_to(tensors: Mapping[str, Tensor]) -> ParameterAccess:
    """Returns the access to the parameters of a model that lies in this process alone."""
    devices = {tensor.device for tensor in tensors.values()}
    device = next(iter(devices)) if len(devices) == 1 else torch.device("cpu")
    if device.type == "cuda" and all(tensor.is_contiguous() for tensor in tensors.values()):
        return DeviceParameters(tensors, device)
    return ModelParameters(tensors)


@torch.no_grad()
def merge_into(target: Tensor, values: Tensor, keep: float) -> None:
    """Does ``target ← keep·target + values`` in place, on one device; narrower targets than fp32 are rounded once."""
    if not keep:
        target.copy_(values)
    elif target.dtype != values.dtype:
        target.copy_(target.to(values.dtype).mul_(keep).add_(values))
    elif target.is_contiguous() and target.device.type == "cpu":
        flat, other = target.view(-1), values.reshape(-1)
        for start in range(0, flat.numel(), _BLOCK_VALUES):
            block = slice(start, start + _BLOCK_VALUES)
            flat[block].mul_(keep).add_(other[block])
    else:
        target.mul_(keep).add_(values)
