"""A node that only answers, as a process of its own that tests can stop, continue and kill; and what it answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.network.rpc import Endpoint, Identity, Message, Peer, Reply, Request, RpcConfig, Stream
from trainer.network.rpc.identity import load_or_create_identity

RUN_ID = "test-run"
FAST = {"host": "127.0.0.1", "heartbeat_s": 0.1, "stall_timeout_s": 1.0, "stop_grace_s": 0.2}
"""Times short enough for tests: a heartbeat may be 0.9 s late before a peer is given up."""


class Question(Message):
    text: str = ""
    numbers: tuple[int, ...] = ()
    sleep_s: float = 0.0


class Answer(Message):
    text: str = ""
    cancelled: int = 0


def fast_config(**options: object) -> RpcConfig:
    """Plain unless ``tls=True`` is given."""
    return RpcConfig(**{**FAST, "tls": False, **options})  # type: ignore[arg-type]


def register_test_methods(endpoint: Endpoint) -> None:
    """What every test node answers.

    ``echo``; ``cancelled``, how many echoes were cancelled; ``refused``, the counters; ``dial``, opens
    ``listen`` at the asker, whose address is the text, and says nothing; ``mirror``, frames back;
    ``pour``, numbered frames until told otherwise; ``deaf``, a stream that reads nothing.
    """
    cancelled = 0

    async def echo(request: Request[Question]) -> Reply[Answer]:
        nonlocal cancelled
        try:
            await asyncio.sleep(request.body.sleep_s)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return Reply(Answer(text=request.body.text), request.payload)

    async def count(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(cancelled=cancelled))

    async def refused(_request: Request[Question]) -> Reply[Answer]:
        return Reply(Answer(text=json.dumps(endpoint.counters.refused)))

    async def dial(request: Request[Question]) -> Reply[Answer]:
        sender = Peer(request.sender, request.body.text)
        async with endpoint.open_stream(sender, "test/listen", Question(), timeout_s=600) as stream:
            await stream.receive()
        return Reply(Answer())

    async def mirror(_request: Request[Question], stream: Stream) -> None:
        while (frame := await stream.receive()) is not None:
            await stream.send(frame.index, frame.payload)

    async def pour(_request: Request[Question], stream: Stream) -> None:
        for index in range(10**6):
            await stream.send(index, bytes(1 << 20))

    async def deaf(request: Request[Question], _stream: Stream) -> None:
        await asyncio.sleep(request.body.sleep_s)

    endpoint.register("test/echo", Question, echo, any_recipient=True)
    endpoint.register("test/cancelled", Question, count)
    endpoint.register("test/dial", Question, dial)
    endpoint.register("test/refused", Question, refused)
    endpoint.register_stream("test/mirror", Question, mirror)
    endpoint.register_stream("test/pour", Question, pour)
    endpoint.register_stream("test/deaf", Question, deaf)


@dataclass
class RpcNode:
    process: subprocess.Popen[str]
    peer: Peer

    def stop(self) -> None:
        """As a machine that hangs: connections stay open, nothing is said."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes `stop`."""
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As a machine that dies."""
        self.process.kill()
        self.process.wait()

    def resident_bytes(self) -> int:
        """Its memory now."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def rpc_node(*, identity_path: str = "", **options: object) -> Iterator[RpcNode]:
    """Starts a node in another process, and kills it at the end."""
    command = [sys.executable, "-m", "tests.support.rpc_node", identity_path, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            peer_id, address, certificate = json.loads(process.stdout.readline())
            yield RpcNode(process, Peer(peer_id, address, certificate.encode() or None))
        finally:
            process.kill()


async def _serve(identity_path: str, options: dict[str, object]) -> None:
    """Prints where it is reached, and ends with its standard input."""
    identity = load_or_create_identity(identity_path) if identity_path else Identity.create()
    endpoint = Endpoint(identity, RUN_ID, fast_config(**options))
    register_test_methods(endpoint)
    await endpoint.start()
    said = json.dumps([endpoint.peer_id, endpoint.address, (endpoint.certificate or b"").decode()])
    sys.stdout.write(said + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await endpoint.stop()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], json.loads(sys.argv[2])))
