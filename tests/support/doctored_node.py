"""A node of a run as the doctor's subject meets it: it answers hello, dial-backs, payloads and terms, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.small_store import text_store
from trainer.network.reachability import HELLO_METHOD, Hello, HelloReply, ReachabilityService, register_probe
from trainer.network.rpc import Endpoint, Identity, Reply, Request
from trainer.run.config import RunConfig, from_mapping, merged
from trainer.run.node.data import open_session
from trainer.run.node.identity import register_terms, terms_of
from trainer.run.node.loop_thread import LoopThread

LOCAL = "127.0.0.1"


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of a node that fits the run of `peer`, as configuration files have them; ``a__b=c`` is ``a.b``."""
    values: dict[str, Any] = {
        "node_id": "newcomer",
        "device": "cpu",
        "state_dir": str(folder / "state"),
        "model": {"preset": "tiny"},
        "inner": {"seq_len": 32, "micro_batch_size": 2},
        # Not made where another is given: a process of its own would make it anew.
        "data": {"store": changes.get("data__store") or str(text_store()), "cache_dir": str(folder / "cache")},
        "checkpoint": {"directory": str(folder / "checkpoints")},
        "rpc": {"host": LOCAL, "public_address": LOCAL, "connect_timeout_s": 2.0},
    }
    for name, value in changes.items():
        path = name.split("__")
        nested: Any = value
        for part in reversed(path):
            nested = {part: nested}
        values = merged(values, nested)
    return values


def config_of(folder: Path, **changes: Any) -> RunConfig:
    return from_mapping(RunConfig, options(folder, **changes))


@contextmanager
def peer(folder: Path, *, version: str = "", **changes: Any) -> Iterator[Endpoint]:
    """Answers as a node with these options does; ``version``: says that it is of another release."""
    config = config_of(folder / "peer", **({"node_id": "peer"} | changes))
    vocabulary = open_session(config.data).catalog.vocabulary()
    shape = config.model.shape(1024)
    assert shape is not None
    endpoint = Endpoint(Identity.create(), config.run_id, config.rpc)
    service = ReachabilityService(endpoint, tls=config.rpc.tls)
    loop = LoopThread("test-peer")

    async def answer_hello(request: Request[Hello]) -> Reply[HelloReply]:
        return Reply(HelloReply(version=version, now=time.time(), seen_host=request.remote_address))

    async def start() -> None:
        if version:
            register_probe(endpoint)
            endpoint.register(HELLO_METHOD, Hello, answer_hello, any_recipient=True)
        else:
            service.register()
        register_terms(endpoint, terms_of(config, shape, vocabulary))
        await endpoint.start()

    async def stop() -> None:
        await service.close()
        await endpoint.stop()

    loop.start()
    try:
        loop.run(start(), 30.0)
        yield endpoint
    finally:
        loop.run(stop(), 30.0)
        loop.stop()


class SlowLink:
    """A TCP relay to ``target`` that lets so many bytes a second pass, each way, of all connections together."""

    def __init__(self, target: tuple[str, int], bytes_per_s: float) -> None:
        self._target = target
        self._pause_s = 4096 / bytes_per_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"{LOCAL}:{self._server.sockets[0].getsockname()[1]}"

    def __enter__(self) -> SlowLink:
        self._thread.start()
        starting = asyncio.start_server(self._relay, LOCAL, 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self._up, self._down = asyncio.Lock(), asyncio.Lock()
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        assert self._server is not None
        self._loop.call_soon_threadsafe(self._server.close)
        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        try:
            await asyncio.gather(self._pass(reader, back, self._up), self._pass(there, writer, self._down))
        except OSError:
            pass
        finally:
            writer.transport.abort()
            back.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: asyncio.Lock) -> None:
        while piece := await reader.read(4096):
            async with line:
                await asyncio.sleep(self._pause_s)
            writer.write(piece)
            await writer.drain()
        writer.transport.abort()
