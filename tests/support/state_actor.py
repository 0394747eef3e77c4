"""Donors and fetchers of state as processes of their own: ``python -m tests.support.state_actor OPTIONS``, as JSON.

A donor (``directory``, ``rate``) writes one JSON line, where it is reached, and serves until it is killed. A fetcher
(``directory``, ``digest``, ``donors``, ``report_bytes``) fetches once, and writes a line when it has received so much.
Both end when their standard input closes, so none outlives the test that started it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.network.transfer import Expectation, StateConfig, StateDonor, fetch_state

_ROOT = Path(__file__).parents[2]


@dataclass
class Actor:
    """A running process and the line it wrote first."""

    process: subprocess.Popen[str]
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> Peer:
        """Where it is reached, of a donor."""
        return _peer(self.said["peer"])

    def read_line(self) -> dict[str, Any]:
        """The next line it writes; empty when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}


@contextmanager
def actors(*options: dict[str, Any]) -> Iterator[list[Actor]]:
    """Starts a process for each, all at once, and kills them at the end."""
    with ExitStack() as stack:
        started = []
        for each in options:
            command = [sys.executable, "-m", "tests.support.state_actor", json.dumps(each)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(Actor(process))
        for one in started:
            one.said = one.read_line()
            assert one.said, f"expected the actor to start, found it ended with {one.process.wait(10)}"
        yield started


def peer_fields(peer: Peer) -> list[str]:
    """A peer as an option."""
    assert peer.peer_id is not None
    return [peer.peer_id, peer.address, (peer.certificate or b"").decode()]


def _peer(fields: list[str]) -> Peer:
    return Peer(fields[0], fields[1], fields[2].encode() or None)


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


async def _run(options: dict[str, Any]) -> None:
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", heartbeat_s=0.2, stop_grace_s=0.1))
    if "donors" not in options:
        StateDonor(endpoint, options["directory"], StateConfig(max_upload_bytes_per_s=options["rate"])).start()
    await endpoint.start()
    _say(peer=peer_fields(endpoint.peer))
    if "donors" not in options:
        await asyncio.Event().wait()
    donors, any_state = list(map(_peer, options["donors"])), Expectation(max_bytes=1 << 40)
    fetching = asyncio.create_task(
        fetch_state(endpoint, donors, options["digest"], options["directory"], expectation=any_state, timeout_s=120)
    )
    while endpoint.counters.received_bytes < options["report_bytes"]:
        assert not fetching.done()
        await asyncio.sleep(0.02)
    _say(received_bytes=endpoint.counters.received_bytes)
    await fetching
    await endpoint.stop()


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_run(json.loads(sys.argv[1])))
