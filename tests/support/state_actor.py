"""Donors and fetchers of state as processes of their own: ``python -m tests.support.state_actor donor|fetch …``.

A donor writes one JSON line, where it is reached, and serves until it is killed. A fetcher fetches once, and writes how
it ended. Both end when their standard input closes, so none outlives the test that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Peer

_ROOT = Path(__file__).parents[2]


@dataclass
class Actor:
    """A running process and the line it wrote first."""

    process: subprocess.Popen[str]
    said: dict[str, str]

    @property
    def peer(self) -> Peer:
        """Where it is reached, of a donor."""
        return Peer(self.said["peer_id"], self.said["address"], self.said["certificate"].encode() or None)

    def read_line(self) -> dict[str, object]:
        """The next line it writes; empty when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        value: dict[str, object] = json.loads(line) if line else {}
        return value


def _start(command: tuple[str, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.state_actor", *command],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def actors(*commands: tuple[str, ...]) -> Iterator[list[Actor]]:
    """Starts one for each command, all at once, and kills them at the end."""
    processes: list[subprocess.Popen[str]] = []
    try:
        processes.extend(map(_start, commands))
        started = [Actor(process, {}) for process in processes]
        for one in started:
            one.said = {name: str(value) for name, value in one.read_line().items()}
            assert one.said, f"expected the actor to start, found it ended with {one.process.wait(10)}"
        yield started
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def spell_peers(peers: Sequence[Peer]) -> str:
    """Peers as an argument."""
    return json.dumps([[peer.peer_id, peer.address, (peer.certificate or b"").decode()] for peer in peers])


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


async def _donate(arguments: argparse.Namespace) -> None:
    from trainer.network.transfer.config import StateConfig
    from trainer.network.transfer.donor import StateDonor

    config = RpcConfig(host="127.0.0.1", tls=not arguments.plain, heartbeat_s=0.2, stop_grace_s=0.1)
    endpoint = Endpoint(Identity.create(), "run", config)
    StateDonor(endpoint, arguments.directory, StateConfig(max_upload_bytes_per_s=arguments.rate)).start()
    await endpoint.start()
    certificate = (endpoint.certificate or b"").decode()
    _say(peer_id=endpoint.peer_id, address=endpoint.address, certificate=certificate)
    await asyncio.Event().wait()


async def _fetch(arguments: argparse.Namespace) -> None:
    from trainer.network.transfer.config import StateConfig
    from trainer.network.transfer.descriptor import Expectation
    from trainer.network.transfer.fetch import fetch_state

    donors = [Peer(who, where, pem.encode() or None) for who, where, pem in json.loads(arguments.donors)]
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", tls=not arguments.plain))
    await endpoint.start()
    _say(started=True)
    began = time.perf_counter()
    fetching = asyncio.create_task(
        fetch_state(
            endpoint,
            donors,
            arguments.digest,
            arguments.directory,
            expectation=Expectation(max_bytes=1 << 40),
            timeout_s=120,
            config=StateConfig(parallel_per_donor=arguments.parallel),
        )
    )
    while not fetching.done():
        if arguments.report_bytes and endpoint.counters.received_bytes >= arguments.report_bytes:
            arguments.report_bytes = 0
            _say(received_bytes=endpoint.counters.received_bytes)
        await asyncio.wait({fetching}, timeout=0.02)
    snapshot = await fetching
    seconds = time.perf_counter() - began
    _say(seconds=seconds, size_bytes=snapshot.descriptor.size_bytes, received_bytes=endpoint.counters.received_bytes)
    await endpoint.stop()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["donor", "fetch"])
    parser.add_argument("directory")
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--donors", default="[]")
    parser.add_argument("--digest", default="")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--report-bytes", type=int, default=0)
    arguments = parser.parse_args()
    _end_with_parent()
    asyncio.run(_donate(arguments) if arguments.role == "donor" else _fetch(arguments))


if __name__ == "__main__":
    main()
