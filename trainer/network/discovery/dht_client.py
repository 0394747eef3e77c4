"""The DHT process as its parent sees it: requests with deadlines, restarts with growing pauses, no orphans.

The two exchange one JSON object a line: first a `DhtSettings`, then `DhtRequest`s; each line the process writes is a
`DhtReply` with the id of a request (0: once it is ready). It is started again whenever it ended, after a pause that
doubles from 1 s to 60 s; after three unanswered requests in a row it is killed. Its log is forwarded to ours.
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
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from genesis.extras import with_extra
from trainer.errors import DiscoveryError
from trainer.network.discovery.node_report import DhtTraffic
from trainer.network.rpc.messages import Message

logger = logging.getLogger(__name__)

MAX_VALUE_BYTES = 16 * 1024
MAX_RECORDS = 4096
MAX_LINE_BYTES = 16 << 20
"""Longest line. hivemind's own messages hold 4 MiB, and JSON at most doubles an announcement's quotation marks."""

_START_TIMEOUT_S = 60.0  # hivemind takes 3 s to import on an idle core, and waits 15 s for its daemon.
_STOP_TIMEOUT_S = 8.0
_GRACE_S = 1.0  # Added to a request's deadline, which the process keeps too.
_POLL_S = 0.05
_MAX_UNANSWERED = 3
_MAX_FOLDER_CHARS = 60
_MAX_PENDING = 256
_FIRST_PAUSE_S, _LAST_PAUSE_S, _STEADY_S = 1.0, 60.0, 60.0

_Key = Annotated[str, Field(max_length=256)]
_Timeout = Annotated[float, Field(gt=0, le=3600)]


class DhtSettings(Message):
    """The configuration of the process's DHT node."""

    parent_pid: int  # The process ends when this is no longer its parent.
    initial_peers: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()  # Addresses to publish instead of those listened on.
    identity_path: str | None = None  # File of the libp2p key, made if it is missing; None takes a new key each time.
    socket_folder: str = ""
    """Folder for the daemon's sockets, which the process removes at its end; empty: hivemind's choice, /tmp."""
    client_mode: bool = False
    map_port: bool = True  # Whether to ask the router to forward the port (UPnP).
    rejoin_interval_s: _Timeout = 5.0  # Seconds between two checks whether the initial peers are still connected.
    refresh_interval_s: _Timeout = 30.0
    """Seconds without contact with a part of the routing table after which nodes are looked for there."""


class DhtRequest(Message):
    """Asks to store a value until it expires, for the records of a key, or for the node's status."""

    id: int
    op: Literal["store", "get", "status"]
    timeout_s: _Timeout
    key: _Key = ""
    subkey: _Key = ""
    value: Annotated[str, Field(max_length=MAX_VALUE_BYTES)] = ""
    expires_at: float = 0.0

    @model_validator(mode="after")
    def _has_keys(self) -> Self:
        if (self.op != "status" and not self.key) or (self.op == "store" and not self.subkey):
            raise ValueError(f"expected key and subkey to {self.op}, found none")
        return self


class Record(Message):
    """A stored value."""

    subkey: str
    value: str


class DhtReply(Message):
    """The reply to the request of this id."""

    id: int
    error: str = ""
    records: tuple[Record, ...] = ()
    skipped: int = 0  # Number of records left out because they are too long, not text, or too many.
    addresses: tuple[str, ...] = ()  # The node's addresses, each with its peer id: initial peers for others.
    num_neighbours: int = 0
    traffic: DhtTraffic = DhtTraffic()


class DhtProcess:
    """Starts and supervises the DHT process and sends it requests, which raise `DiscoveryError` where they fail."""

    def __init__(self, settings: DhtSettings) -> None:
        self.num_restarts = 0
        self.num_neighbours = 0  # Nodes in its routing table, by its last reply.
        self.traffic = DhtTraffic()  # What others have asked it, by its last reply.
        self._settings = settings
        self._process: Process | None = None
        self._pending: dict[int, asyncio.Future[DhtReply]] = {}
        self._last_id = 0
        self._num_unanswered = 0
        self._is_ready = self._has_failed = False
        self._last_error = ""
        self._supervising: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The running process, if there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts it in the background; it is ready some seconds later, and ends with the thread of this event loop."""
        if importlib.util.find_spec("hivemind") is None:
            raise with_extra(ModuleNotFoundError("no hivemind", name="hivemind"))
        if self._supervising is None:
            self._supervising = asyncio.create_task(self._supervise())

    async def wait_ready(self, timeout_s: float, *, first_start_only: bool = False) -> None:
        """Waits until it answers; with ``first_start_only`` not for a second start if the first fails."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self._is_ready or (first_start_only and self._has_failed)):
                    await asyncio.sleep(_POLL_S)
        if not self._is_ready:
            found = f"found it is not ({self._last_error or 'no error in its log'})"
            raise DiscoveryError(f"expected the DHT process to be ready within {timeout_s:g} s, {found}")

    async def store(self, key: str, subkey: str, value: str, expires_at: float, timeout_s: float) -> None:
        """Stores a value until it expires."""
        await self._send("store", timeout_s, key=key, subkey=subkey, value=value, expires_at=expires_at)

    async def get(self, key: str, timeout_s: float) -> tuple[tuple[Record, ...], int]:
        """Returns the records of a key, unverified, and how many were left out."""
        reply = await self._send("get", timeout_s, key=key)
        return reply.records, reply.skipped

    async def status(self, timeout_s: float) -> DhtReply:
        """Returns addresses and number of neighbours."""
        return await self._send("status", timeout_s)

    async def close(self) -> None:
        """Ends the process, by force if it does not end by itself."""
        if self._supervising is not None:
            self._supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervising
            self._supervising = None

    async def _send(self, op: Literal["store", "get", "status"], timeout_s: float, **fields: Any) -> DhtReply:
        self._last_id += 1
        request = DhtRequest(id=self._last_id, op=op, timeout_s=timeout_s, **fields)
        process = self._process
        if process is None or process.stdin is None or not self._is_ready:
            raise DiscoveryError("expected a running DHT process, found none (yet); it is being started")
        if len(self._pending) >= _MAX_PENDING:
            raise DiscoveryError(
                f"expected at most {_MAX_PENDING} requests under way at the DHT process; ask less often"
            )
        future: asyncio.Future[DhtReply] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = future
        try:
            process.stdin.write(request.model_dump_json().encode() + b"\n")
            async with asyncio.timeout(timeout_s + _GRACE_S):
                reply = await future
        except TimeoutError:
            self._num_unanswered += 1
            if self._num_unanswered >= _MAX_UNANSWERED and process.returncode is None:
                logger.warning("killed the DHT process (%d) after %d unanswered requests", process.pid, _MAX_UNANSWERED)
                _kill_group(process)
            raise DiscoveryError(f"expected an answer of the DHT process within {timeout_s:g} s") from None
        except OSError as error:
            raise DiscoveryError(f"the DHT process cannot be reached: {error}") from None
        finally:
            self._pending.pop(request.id, None)
        self._num_unanswered = 0
        if reply.error:
            raise DiscoveryError(f"the DHT {op} failed: {reply.error}")
        return reply

    async def _supervise(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                # A daemon that is killed leaves its sockets behind; removed with the folder. Their paths must be short.
                base = "/tmp" if len(tempfile.gettempdir()) > _MAX_FOLDER_CHARS else None
                with tempfile.TemporaryDirectory(prefix="genesis-dht-", dir=base, ignore_cleanup_errors=True) as folder:
                    await self._run_once(folder)
            except OSError as error:
                logger.error("the DHT process cannot be started: %s", error)
            if time.monotonic() - began > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            self.num_restarts += 1
            logger.warning("the DHT process ended; it restarts in %.0f s", pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    async def _run_once(self, socket_folder: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainer.network.discovery.dht_node",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        self._process = process
        self._num_unanswered = self.num_neighbours = 0
        logging_task = asyncio.create_task(self._forward_log(process))
        try:
            await self._converse(process, socket_folder)
        finally:
            self._is_ready = False
            self._process = None
            await asyncio.shield(_end(process))
            await asyncio.wait({logging_task}, timeout=1.0)  # Its last lines say why it ended.
            logging_task.cancel()
            self._has_failed = True
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(DiscoveryError("the DHT process ended before it answered"))

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
                self._receive(line)
                line = await stdout.readline()
        except TimeoutError:
            logger.error("the DHT process was not ready within %g s", _START_TIMEOUT_S)
        except ValueError:
            logger.error("the DHT process wrote a line of more than %d bytes", MAX_LINE_BYTES)

    def _receive(self, line: bytes) -> None:
        try:
            reply = DhtReply.model_validate_json(line)
        except ValidationError as error:
            logger.error("unreadable reply of the DHT process: %s", error.errors(include_input=False)[0]["msg"])
            return
        self.num_neighbours, self.traffic = reply.num_neighbours, reply.traffic
        future = self._pending.get(reply.id)
        if reply.id == 0:
            self._is_ready = True
            logger.info("the DHT process is ready at %s", ", ".join(reply.addresses) or "no address of its own")
        elif future is not None and not future.done():
            future.set_result(reply)

    async def _forward_log(self, process: Process) -> None:
        """Forwards its standard error to our log: warnings and errors as such, all else as debug."""
        stderr = process.stderr
        while stderr is not None:
            try:
                line = (await stderr.readline()).decode(errors="replace")
            except ValueError:
                continue  # Too long; the reader has dropped it.
            if not line:
                return
            level, _, text = line.rstrip().partition(" ")
            number = {"WARN": logging.WARNING, "WARNING": logging.WARNING, "ERROR": logging.ERROR}.get(level)
            if number == logging.ERROR:
                self._last_error = text[:500]
            shown = text[:1000] if number else line[:1000]
            logger.log(number or logging.DEBUG, "DHT process %d: %s", process.pid, shown)


async def _end(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        # Usual on a busy machine, and harmless: it has nothing to save, and others notice that it is gone.
        logger.info("killed the DHT process (%d), which took more than %g s to end", process.pid, _STOP_TIMEOUT_S)
        _kill_group(process)
        await process.wait()


def _kill_group(process: Process) -> None:
    if process.returncode is None:  # Not yet waited for: the number is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
