"""An event loop in a thread of its own, beside the training thread, for everything that talks to others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from trainer.errors import TrainerError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines on behalf of other threads, from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine in the loop and waits for its result.

        Raises:
            TrainerError: it takes longer, or the loop ends meanwhile.
        """
        if self.loop.is_closed():
            coroutine.close()
            raise TrainerError("the node's network side has ended")
        future = self.spawn(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise TrainerError("the node's network side has ended") from None
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise TrainerError(
                f"expected the node's network side to answer within {timeout_s:.0f} s, found it busy or stuck"
            ) from None

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Cancels what still runs and ends the thread."""
        if not self.is_running:
            self.loop.close()
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            # Unlike asyncio.Runner, which logs the errors of tasks that it cancels.
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
