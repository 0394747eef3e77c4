"""The DHT process as its parent sees it: requests with deadlines, restarts with growing pauses, no orphans.

The process is started at once and whenever it ended, after a pause that doubles from 1 s to 60 s and starts anew once
it has run for a minute. A request while it is down, or that gets no answer in time, raises `DiscoveryError`; three
silences in a row and the process is taken for hung, killed and started again. Its log goes into ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import Process

from pydantic import ValidationError

from genesis.extras import with_extra
from trainer.errors import DiscoveryError
from trainer.network.discovery.dht_messages import (
    MAX_LINE_BYTES,
    DhtReply,
    DhtRequest,
    DhtSettings,
    GetRequest,
    Record,
    StatusRequest,
    StoreRequest,
)

__all__ = ["DhtProcess"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
"""hivemind takes 3 s to import on an idle core, and its daemon is given 15 s."""
_STOP_TIMEOUT_S = 8.0
_GRACE_S = 1.0
"""What a request's answer may come later than its deadline, which the process keeps too."""
_MAX_SILENT = 3
_MAX_FOLDER_CHARS = 60
_MAX_PENDING = 256
_FIRST_PAUSE_S, _LAST_PAUSE_S, _STEADY_S = 1.0, 60.0, 60.0


class DhtProcess:
    """Starts, watches and asks the DHT process; `start` it, and `close` it.

    Args:
        settings: how its node is to be.
    """

    def __init__(self, settings: DhtSettings) -> None:
        self.num_restarts = 0
        self.num_neighbours = 0
        """Nodes in its routing table, by its last answer."""
        self._settings = settings
        self._process: Process | None = None
        self._pending: dict[int, asyncio.Future[DhtReply]] = {}
        self._next_id = 1
        self._num_silent = 0
        self._ready = asyncio.Event()
        self._ended = asyncio.Event()
        self._last_error = ""
        self._supervising: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process now running, if one is."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts it in the background; it is ready some seconds later.

        It ends with the thread in which this loop runs, so that must be one that lives as long as the node.

        Raises:
            ModuleNotFoundError: hivemind is not installed; it says what to install.
        """
        if importlib.util.find_spec("hivemind") is None:
            raise with_extra(ModuleNotFoundError("no hivemind", name="hivemind"))
        if self._supervising is None:
            self._supervising = asyncio.create_task(self._supervise())

    async def wait_ready(self, timeout_s: float, *, first_start_only: bool = False) -> None:
        """Until it answers.

        Args:
            timeout_s: seconds to wait.
            first_start_only: do not wait for a second start if the first fails.

        Raises:
            DiscoveryError: it does not.
        """
        events = [self._ready, self._ended] if first_start_only else [self._ready]
        waiting = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if not self._ready.is_set():
            raise DiscoveryError(
                f"expected the DHT process to be ready within {timeout_s:g} s, found it is not"
                f" ({self._last_error or 'no error in its log'})"
            )

    async def store(self, key: str, subkey: str, value: str, expires_at: float, timeout_s: float) -> None:
        """Files a value until it expires.

        Raises:
            DiscoveryError: it could not be filed in time.
        """
        request = StoreRequest(
            id=self._new_id(), key=key, subkey=subkey, value=value, expires_at=expires_at, timeout_s=timeout_s
        )
        await self._ask(request)

    async def get(self, key: str, timeout_s: float) -> tuple[tuple[Record, ...], int]:
        """All records of a key, unverified, and how many were left out.

        Raises:
            DiscoveryError: no answer in time.
        """
        reply = await self._ask(GetRequest(id=self._new_id(), key=key, timeout_s=timeout_s))
        return reply.records, reply.skipped

    async def status(self, timeout_s: float) -> DhtReply:
        """Addresses and number of neighbours.

        Raises:
            DiscoveryError: no answer in time.
        """
        return await self._ask(StatusRequest(id=self._new_id(), timeout_s=timeout_s))

    async def close(self) -> None:
        """Ends the process, with force if it does not end by itself."""
        if self._supervising is not None:
            self._supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervising
            self._supervising = None

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _ask(self, request: DhtRequest) -> DhtReply:
        process = self._process
        if process is None or process.stdin is None or not self._ready.is_set():
            raise DiscoveryError("expected a running DHT process, found none (yet); it is being started")
        if len(self._pending) >= _MAX_PENDING:
            raise DiscoveryError(
                f"expected at most {_MAX_PENDING} requests under way at the DHT process; ask less often"
            )
        future: asyncio.Future[DhtReply] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = future
        try:
            process.stdin.write(request.model_dump_json().encode() + b"\n")
            async with asyncio.timeout(request.timeout_s + _GRACE_S):
                reply = await future
        except TimeoutError:
            self._count_silence(process)
            raise DiscoveryError(f"expected an answer of the DHT process within {request.timeout_s:g} s") from None
        except OSError as error:
            raise DiscoveryError(f"the DHT process cannot be asked: {error}") from None
        finally:
            self._pending.pop(request.id, None)
        self._num_silent = 0
        if reply.error:
            raise DiscoveryError(f"the DHT {request.op} did not work: {reply.error}")
        return reply

    def _count_silence(self, process: Process) -> None:
        self._num_silent += 1
        if self._num_silent >= _MAX_SILENT and process.returncode is None:
            logger.warning("the DHT process (%d) left %d requests unanswered: started anew", process.pid, _MAX_SILENT)
            _kill_group(process)

    async def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                await self._run_once()
            except OSError as error:
                logger.error("the DHT process cannot be started: %s", error)
            if time.monotonic() - began > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            self.num_restarts += 1
            logger.warning("the DHT process ended; started again in %.0f s", pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _run_once(self) -> None:
        """One life of the process, from start to end."""
        # A daemon that is killed leaves its sockets behind; removed with the folder. Their paths must be short.
        base = "/tmp" if len(tempfile.gettempdir()) > _MAX_FOLDER_CHARS else None
        with tempfile.TemporaryDirectory(prefix="genesis-dht-", dir=base, ignore_cleanup_errors=True) as folder:
            await self._run_in(folder)

    async def _run_in(self, socket_folder: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainer.network.discovery.dht_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        self._process = process
        self._num_silent = self.num_neighbours = 0
        logging_task = asyncio.create_task(self._forward_log(process))
        try:
            await self._converse(process, socket_folder)
        finally:
            self._ready.clear()
            self._process = None
            await asyncio.shield(_end(process))
            await asyncio.wait({logging_task}, timeout=1.0)  # What it wrote last says why it ended.
            logging_task.cancel()
            self._ended.set()
            self._fail_pending()

    async def _converse(self, process: Process, socket_folder: str) -> None:
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise OSError("the DHT process has no pipes")
        settings = self._settings.model_copy(update={"parent_pid": os.getpid(), "socket_folder": socket_folder})
        stdin.write(settings.model_dump_json().encode() + b"\n")
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await stdout.readline()
            while line:
                self._take(line)
                line = await stdout.readline()
        except TimeoutError:
            logger.error("the DHT process was not ready within %g s", _START_TIMEOUT_S)
        except ValueError:
            logger.error("the DHT process wrote a line of more than %d bytes", MAX_LINE_BYTES)

    def _take(self, line: bytes) -> None:
        try:
            reply = DhtReply.model_validate_json(line)
        except ValidationError as error:
            logger.error("the DHT process wrote what cannot be read: %s", error.errors(include_input=False)[0]["msg"])
            return
        self.num_neighbours = reply.num_neighbours
        if reply.id == 0:
            self._ready.set()
            logger.info("the DHT process is ready at %s", ", ".join(reply.addresses) or "no address of its own")
            return
        future = self._pending.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def _forward_log(self, process: Process) -> None:
        """Its standard error into our log: warnings and errors as such, all else as debug."""
        stderr = process.stderr
        while stderr is not None:
            try:
                line = (await stderr.readline()).decode(errors="replace")
            except ValueError:
                continue  # Too long; the reader has thrown it away.
            if not line:
                return
            level, _, text = line.rstrip().partition(" ")
            number = {"WARN": logging.WARNING, "WARNING": logging.WARNING, "ERROR": logging.ERROR}.get(level)
            if number == logging.ERROR:
                self._last_error = text[:500]
            logger.log(
                number or logging.DEBUG, "DHT process %d: %s", process.pid, text[:1000] if number else line[:1000]
            )

    def _fail_pending(self) -> None:
        for future in self._pending.values():
            if not future.done():
                future.set_exception(DiscoveryError("the DHT process ended before it answered"))


async def _end(process: Process) -> None:
    """Closes its input, waits, and kills its group if it is still there."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        # Usual on a busy machine, and no loss: it has nothing to save, and others notice that it is gone.
        logger.info("killed the DHT process (%d), which took more than %g s to end", process.pid, _STOP_TIMEOUT_S)
        _kill_group(process)
        await process.wait()


def _kill_group(process: Process) -> None:
    if process.returncode is None:  # Not yet waited for: the number is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
