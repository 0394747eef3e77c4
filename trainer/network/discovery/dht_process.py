"""The process that runs hivemind's DHT; `DhtProcess` starts this module and sends it requests.

It is a process of its own because hivemind brings a Go daemon, its own logging and 2 s of imports, and because a hang
or crash in it must not stop training. It reads JSON lines (`dht_messages`) from standard input and replies on standard
output; it logs to standard error, ``LEVEL message``, which the parent forwards.

Guarantees: it ends within a few seconds when standard input closes or the parent dies (SIGKILL included), together with
the Go daemon; it runs in a session of its own, and if the daemon did not stop it finally kills the rest of its group.
At most 64 requests run at a time; each has a deadline.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import signal
import sys
from asyncio import StreamReader, StreamReaderProtocol
from collections.abc import Callable

from pydantic import ValidationError

from trainer.network.discovery.dht_messages import MAX_LINE_BYTES, DhtReply, DhtRequest, DhtSettings
from trainer.network.discovery.dht_node import AnnouncementNode
from trainer.network.discovery.parent import die_with_parent

__all__ = ["main"]

logger = logging.getLogger(__name__)

_MAX_CONCURRENT = 64
_STOP_TIMEOUT_S = 5.0
_GIVE_UP_S = 1.0
_PARENT_CHECK_INTERVAL_S = 2.0


Send = Callable[[DhtReply], None]


def _write(descriptor: int, reply: DhtReply) -> None:
    data = memoryview(reply.model_dump_json().encode() + b"\n")
    while data:  # The parent always reads; a pipe that is full for a moment may block this process.
        data = data[os.write(descriptor, data) :]


class _Service:
    """Reads requests and replies to them, several at a time."""

    def __init__(self, node: AnnouncementNode, send: Send) -> None:
        self._node = node
        self._send = send
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self, requests: StreamReader) -> None:
        """Serves until standard input ends; cancels running requests before the node they need stops."""
        try:
            while line := await requests.readline():
                try:
                    request = DhtRequest.model_validate_json(line)
                except ValidationError as error:
                    logger.error("unreadable request: %s", error.errors(include_input=False)[0]["msg"])
                    continue
                await self._slots.acquire()
                task = asyncio.create_task(self._handle(request))
                self._running.add(task)
                task.add_done_callback(self._finished)
        finally:
            for task in self._running:
                task.cancel()
            if self._running:
                await asyncio.wait(self._running, timeout=_GIVE_UP_S)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._slots.release()

    async def _handle(self, request: DhtRequest) -> None:
        try:
            async with asyncio.timeout(request.timeout_s):
                reply = await self._reply(request)
        except TimeoutError:
            reply = DhtReply(id=request.id, error=f"no answer of the DHT within {request.timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - hivemind raises anything; the parent gets the text
            reply = DhtReply(id=request.id, error=f"{type(error).__name__}: {error}"[:500])
        self._send(reply.model_copy(update={"num_neighbours": self._node.num_neighbours()}))

    async def _reply(self, request: DhtRequest) -> DhtReply:
        if request.op == "store":
            stored = await self._node.store(request.key, request.subkey, request.value, request.expires_at)
            return DhtReply(id=request.id, error="" if stored else "no DHT node took the record")
        if request.op == "get":
            records, skipped = await self._node.get(request.key)
            return DhtReply(id=request.id, records=records, skipped=skipped)
        return DhtReply(id=request.id, addresses=await self._node.addresses())


async def _run(send: Send) -> None:
    loop = asyncio.get_running_loop()
    requests = StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: StreamReaderProtocol(requests), sys.stdin)
    settings = DhtSettings.model_validate_json(await requests.readline())
    serving = asyncio.create_task(_serve(settings, requests, send))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    watching = asyncio.create_task(_watch_parent(settings.parent_pid, serving))
    try:
        await serving
    except asyncio.CancelledError:
        logger.info("stopped by a signal")
    finally:
        watching.cancel()
        if settings.socket_folder:
            shutil.rmtree(settings.socket_folder, ignore_errors=True)


async def _serve(settings: DhtSettings, requests: StreamReader, send: Send) -> None:
    node = await AnnouncementNode.start(settings)
    try:
        send(DhtReply(id=0, addresses=await node.addresses()))
        await _Service(node, send).serve(requests)
    finally:
        await node.stop(_STOP_TIMEOUT_S)


async def _watch_parent(parent_pid: int, serving: asyncio.Task[None]) -> None:
    """Covers a fork of the dead parent that holds standard input open, and kernels without a parent-death signal."""
    while os.getppid() == parent_pid:
        await asyncio.sleep(_PARENT_CHECK_INTERVAL_S)
    serving.cancel()


def _log_to_stderr() -> None:
    """Sends all logging, hivemind's included, to standard error in the form the parent reads."""
    from hivemind.utils.logging import use_hivemind_log_handler

    use_hivemind_log_handler("nowhere")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s", force=True)


def main() -> int:
    """Runs until the parent closes standard input or ends; returns 0, or 1 if the node did not start or stop."""
    die_with_parent(signal.SIGTERM)
    send = functools.partial(_write, os.dup(1))
    os.dup2(2, 1)  # Everything printed goes into the log.
    _log_to_stderr()
    code = 0
    try:
        asyncio.run(_run(send))
    except Exception as error:  # noqa: BLE001 - the last line of defence; it is logged and the process ends
        logger.error("the DHT process ends: %s: %s", type(error).__name__, str(error) or "no details")
        code = 1
    if code and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # The daemon may still run.
    return code


if __name__ == "__main__":
    sys.exit(main())
