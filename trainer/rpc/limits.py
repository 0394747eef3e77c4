"""How much peers may have a node do and hold at once, each of them and all together.

What does not fit is refused at once (calls, streams), or waits on the peer's side of the connection (frames of a
stream: `ByteBudget` never blocks, its users leave the next frame unread).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.errors import RefusedError
from trainer.rpc.config import RpcConfig
from trainer.rpc.messages import PeerId
from trainer.rpc.reasons import Reason

__all__ = ["ByteBudget", "ServingLimits", "Slots"]


class Slots:
    """Things going on at once, per key and in all."""

    def __init__(self, what: str, max_total: int, max_per_key: int) -> None:
        self._what = what
        self._max_total = max_total
        self._max_per_key = max_per_key
        self._by_key: Counter[str] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    @contextmanager
    def taken(self, key: str) -> Iterator[None]:
        """Holds one of ``key``'s slots inside the block.

        Raises:
            RefusedError: ``busy``.
        """
        if self._total >= self._max_total or self._by_key[key] >= self._max_per_key:
            raise RefusedError(
                Reason.BUSY,
                f"expected at most {self._max_per_key} {self._what} of one peer and {self._max_total} of all at once, "
                "found more; try again later",
            )
        self._by_key[key] += 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]


class ByteBudget:
    """Bytes received ahead of their readers, per peer and in all."""

    def __init__(self, max_total_bytes: int, max_bytes_per_peer: int) -> None:
        self._max_total_bytes = max_total_bytes
        self._max_bytes_per_peer = max_bytes_per_peer
        self._by_peer: Counter[PeerId] = Counter()
        self._total_bytes = 0

    @property
    def total_bytes(self) -> int:
        """Held now."""
        return self._total_bytes

    def has_room(self, peer: PeerId, size_bytes: int) -> bool:
        """Whether ``size_bytes`` more from ``peer`` fit."""
        return (
            self._total_bytes + size_bytes <= self._max_total_bytes
            and self._by_peer[peer] + size_bytes <= self._max_bytes_per_peer
        )

    def take(self, peer: PeerId, size_bytes: int) -> None:
        """Counts bytes that are held from now on, whether there was room or not."""
        self._by_peer[peer] += size_bytes
        self._total_bytes += size_bytes

    def give(self, peer: PeerId, size_bytes: int) -> None:
        """Counts them as no longer held."""
        self._total_bytes -= size_bytes
        self._by_peer[peer] -= size_bytes
        if not self._by_peer[peer]:
            del self._by_peer[peer]


class ServingLimits:
    """The limits of one endpoint's server."""

    def __init__(self, config: RpcConfig) -> None:
        everything = config.max_calls + config.max_streams + config.max_waiting_per_host
        self.waiting = Slots("unidentified calls", everything, config.max_waiting_per_host)
        self.calls = Slots("calls", config.max_calls, config.max_calls_per_peer)
        self.streams = Slots("streams", config.max_streams, config.max_streams_per_peer)
