"""The first thing that went wrong with a stream, so that whoever waits on either half of it hears of it at once."""

from __future__ import annotations

import asyncio

from trainer.errors import RpcError

__all__ = ["Failure"]


class Failure:
    """Set at most once; later errors are consequences of the first."""

    def __init__(self) -> None:
        self.error: RpcError | None = None
        self._happened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self, error: RpcError) -> None:
        """Records ``error``, unless there is one."""
        if self.error is None:
            self.error = error
            self._happened.set_result(None)

    def raise_if_set(self) -> None:
        """Raises the error, if there is one."""
        if self.error is not None:
            raise self.error

    async def race(self, task: asyncio.Task[None]) -> None:
        """Waits until ``task`` is done or something went wrong; cancels nothing."""
        await asyncio.wait({task, self._happened}, return_when=asyncio.FIRST_COMPLETED)
