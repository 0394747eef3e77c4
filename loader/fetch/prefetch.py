"""The next shard, opened in the background while this one is read.

One daemon thread a shard, started when it is asked for and gone when it is done: nothing to shut down, and a process
ends whether or not a download does. What had failed before it was needed is tried again in the foreground. The
trade-off: a second shard is mapped (20 MB, of which the kernel keeps what it likes).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

from loader.errors import DataUnavailableError
from loader.fetch.shards import OpenShard

__all__ = ["Prefetcher"]

logger = logging.getLogger(__name__)

_PATIENCE: Final = 2
"""Opening may try for the transfer form in vain and then for the file; its own error says more than ours."""


class Prefetcher:
    """Opens shards ahead.

    Args:
        open_shard: opens one; called in threads.
        timeout_s: how long the opening of one may try for each of its objects.
    """

    def __init__(self, open_shard: Callable[[int], OpenShard], timeout_s: float) -> None:
        self._open_shard = open_shard
        self._timeout_s = timeout_s
        self._coming: dict[int, Future[OpenShard]] = {}

    def want(self, shard_ids: set[int]) -> None:
        """Opens these in the background, and lets go of others that were wanted before."""
        for shard_id in self._coming.keys() - shard_ids:
            del self._coming[shard_id]
        for shard_id in shard_ids - self._coming.keys():
            future: Future[OpenShard] = Future()
            self._coming[shard_id] = future
            threading.Thread(target=self._run, args=(shard_id, future), name=f"shard-{shard_id}", daemon=True).start()

    def take(self, shard_id: int) -> OpenShard:
        """The shard; waits for it if it is being opened, opens it if it is not.

        Raises:
            LoaderError: it cannot be opened.
        """
        future = self._coming.pop(shard_id, None)
        if future is not None and future.done() and (failure := future.exception()) is not None:
            logger.info("shard %d was not fetched ahead (%s); fetching it now", shard_id, failure)
            future = None
        if future is None:
            return self._open_shard(shard_id)
        try:
            return future.result(_PATIENCE * self._timeout_s)
        except FutureTimeoutError:
            raise DataUnavailableError(
                f"shard {shard_id} was not fetched in {_PATIENCE * self._timeout_s:.0f} s; check the network"
            ) from None

    def _run(self, shard_id: int, future: Future[OpenShard]) -> None:
        try:
            future.set_result(self._open_shard(shard_id))
        except Exception as error:
            logger.debug("shard %d", shard_id, exc_info=True)
            future.set_exception(error)
