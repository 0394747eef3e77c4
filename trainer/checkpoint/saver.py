"""Saving in the background: a copy into reused host memory, then one write at a time in a thread.

The copy is all that a save costs the training thread: 360 MB in 18 ms on two cores. What never changes (`HostCopy`) is
not copied, and what is still being computed (a `Future`) the writing thread waits for. From a GPU a save costs a copy
on the device, where there is room for one: a stream of its own takes it into pinned memory beside the steps to come.
Where there is none, the copies to the host are queued behind the kernels that made the values and ahead of those that
will change them, and the steps wait for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.errors import CheckpointError
from trainer.outer.engine.device_copy import has_room, mark

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0  # A disk that takes longer hangs.
Staged = Callable[[], dict[str, object]]  # Waits for what is not there yet, and returns the copied state.
_Path = tuple[str | int, ...]
_PLAIN = (bool, int, float, str)  # bool before int, of which it is a kind.

_INT_BITS = 1024  # ``weights_only`` does not load those of more than some 2,000.


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor in host memory that nobody changes any more: it is saved as it is, without another copy."""

    tensor: Tensor


class HostBuffers:
    """Host memory by place in the tree, reused as long as shapes and dtypes stay."""

    def __init__(self) -> None:
        self._buffers: dict[_Path, Tensor] = {}

    def stage(self, tree: Mapping[str, object]) -> Staged:
        """Copies nested mappings (keys: str or int), lists and tuples of tensors and plain values over those before.

        A future stands for values that never change once they are there, of types that can be loaded again.
        Raises `CheckpointError`: something in it has another type, and could not be loaded again.
        """
        used: dict[_Path, Tensor] = {}
        from_devices = _FromDevices(tree)
        copied = cast(dict[str, object], self._copy(tree, (), used, from_devices))
        self._buffers = used  # Drops buffers of what is no longer in the state.
        arrived = from_devices.begin()

        def finished() -> dict[str, object]:
            arrived()
            return cast(dict[str, object], tree_map_only(Future, _awaited, copied))

        return finished

    def _copy(self, value: object, path: _Path, used: dict[_Path, Tensor], from_devices: _FromDevices) -> object:
        if isinstance(value, Tensor):
            used[path] = buffer = self._filled(value, path, from_devices)
            return buffer
        if isinstance(value, HostCopy):
            return value.tensor
        if isinstance(value, Future):
            return value
        if isinstance(value, Mapping):
            keys = {key: _key(key, path) for key in value}
            return {keys[key]: self._copy(item, (*path, keys[key]), used, from_devices) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self._copy(item, (*path, index), used, from_devices) for index, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return _plain(value, path)

    def _filled(self, tensor: Tensor, path: _Path, from_devices: _FromDevices) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise _refusal(path, "dense tensors", f"a tensor of {tensor.layout} on {tensor.device}")
        buffer = self._buffers.get(path)
        pinned = tensor.is_cuda
        wanted = (tensor.shape, tensor.dtype, pinned)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.is_pinned()) != wanted:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        if pinned:
            from_devices.add(tensor.detach(), buffer)
            return buffer
        return buffer.copy_(tensor.detach())


class _FromDevices:
    """The copies of one save from GPUs to pinned memory."""

    def __init__(self, tree: Mapping[str, object]) -> None:
        tensors = {id(leaf): leaf for leaf in tree_leaves(dict(tree)) if isinstance(leaf, Tensor) and leaf.is_cuda}
        sizes: dict[torch.device, int] = {}
        for tensor in tensors.values():
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.nbytes
        self._roomy = {device for device, size_bytes in sizes.items() if has_room(device, size_bytes)}
        self._copies: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self._direct: set[torch.device] = set()

    def add(self, tensor: Tensor, buffer: Tensor) -> None:
        """Takes a tensor's values as they are when the kernels queued so far are done."""
        if tensor.device in self._roomy:
            try:
                self._copies.setdefault(tensor.device, []).append((tensor.clone(), buffer))
            except torch.OutOfMemoryError:  # Free, but not in one piece.
                self._roomy.discard(tensor.device)
            else:
                return
        buffer.copy_(tensor, non_blocking=True)
        self._direct.add(tensor.device)

    def begin(self) -> Callable[[], None]:
        """Queues what is to be copied beside the steps to come; returns what waits for all copies."""
        events = [mark(device) for device in self._direct]
        for device, copies in self._copies.items():
            ready, stream = mark(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                if ready is not None:
                    stream.wait_event(ready)
                for copy, buffer in copies:
                    buffer.copy_(copy, non_blocking=True)
                    copy.record_stream(stream)  # Its memory is not given to others before.
                events.append(mark(device))
        self._copies.clear()

        def arrived() -> None:
            for event in events:
                if event is not None:
                    event.synchronize()

        return arrived


def _awaited(value: Future[object]) -> object:
    try:
        return value.result(TIMEOUT_S)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"expected all of the state to be there within {TIMEOUT_S:g} s, found {found}") from error


def _key(key: object, path: _Path) -> str | int:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise _refusal(path, "keys that are str or int", f"the key {key!r}")
    return str(key) if isinstance(key, str) else int(key)


def _plain(value: object, path: _Path) -> object:
    """Converts a value to exactly a plain type: ``weights_only`` does not load numpy's float64, though it is a float.

    Bytes are refused, since it does not load empty ones either; a tensor of uint8 holds them.
    """
    if value is None:
        return None
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        raise _refusal(path, f"integers of at most {_INT_BITS} bits", f"one of {value.bit_length()}")
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind(value)
    raise _refusal(path, "tensors and plain values (dict, list, tuple, str, numbers, None)", type(value).__name__)


def _refusal(path: _Path, expected: str, found: str) -> CheckpointError:
    where = "".join(f"[{part!r}]" for part in path)
    return CheckpointError(f"contents{where}: expected {expected}, found {found}")


class BackgroundSaver:
    """A context manager that copies a state and writes it in a thread; used by one thread."""

    def __init__(self, place: Path, thread_name: str) -> None:
        self._place = place
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=thread_name)
        self._writing: Future[None] | None = None
        self.saved = 0
        self.skipped = 0  # Periodic saves left out because the one before was still being written.

    @property
    def busy(self) -> bool:
        """Whether a save is being written now; a periodic one would be left out."""
        return self._writing is not None and not self._writing.done()

    def leaves_out(self) -> bool:
        """Returns whether a periodic save is left out now, since one is being written, and counts it then."""
        self.skipped += self.busy
        return self.busy

    def flush(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for the latest save. Raises `CheckpointError`: it takes longer; or the error that its write raised."""
        if self._writing is None:
            return
        try:
            self._writing.result(timeout_s)
        except TimeoutError:
            raise CheckpointError(
                f"{self._place}: expected the checkpoint to be on the disk within {timeout_s:g} s, found it still "
                "being written; is the disk hanging?"
            ) from None
        finally:
            if self._writing.done():  # An interrupted wait leaves it running, and its buffers in use.
                self._writing = None

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits for the latest save, ends the thread and releases the lock. Raises `CheckpointError`: as `flush`."""
        try:
            self.flush(timeout_s)
        finally:
            self._thread.shutdown(wait=False)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)  # The first error is the one to raise.

    @property
    def _is_settled(self) -> bool:
        """Whether no save was begun since the last `flush` that saw its end."""
        return self._writing is None

    def _begin(self, contents: Mapping[str, object], write: Callable[[Staged], None]) -> None:
        """Copies the contents, and has the thread call ``write``, whose error the next `flush` raises."""
        self._writing = self._thread.submit(write, self._buffers.stage(contents))

    def _release(self) -> None:
        """Releases the lock on the files; called once, at the end."""
        raise NotImplementedError
