"""Donors and fetchers of state as processes of their own: ``python -m tests.support.state_actor OPTIONS``, as JSON.

A donor (``directory``, ``rate``) says where it is reached, and serves. A fetcher (``directory``, ``digest``,
``donors``, ``report_bytes``) fetches once, and says when it has so much. Both end with their standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.support.child import Child, say
from trainer.network.rpc import Endpoint, Identity, Peer, RpcConfig
from trainer.network.transfer import Expectation, StateConfig, StateDonor, fetch_state


class Actor(Child):
    said: dict[str, Any]

    @property
    def peer(self) -> Peer:
        return _peer(self.said["peer"])

    def read_line(self) -> dict[str, Any]:
        return self.hear() or {}


@contextmanager
def actors(*options: dict[str, Any]) -> Iterator[list[Actor]]:
    """Starts a process for each, all at once, and kills them at the end."""
    with ExitStack() as stack:
        started = [stack.enter_context(Actor("state_actor", json.dumps(each))) for each in options]
        for one in started:
            one.said = one.read_line()
            assert one.said, f"expected the actor to start, found it ended with {one.process.wait(10)}"
        yield started


def peer_fields(peer: Peer) -> list[str]:
    assert peer.peer_id is not None
    return [peer.peer_id, peer.address, (peer.certificate or b"").decode()]


def _peer(fields: list[str]) -> Peer:
    return Peer(fields[0], fields[1], fields[2].encode() or None)


async def _run(options: dict[str, Any]) -> None:
    endpoint = Endpoint(Identity.create(), "run", RpcConfig(host="127.0.0.1", heartbeat_s=0.2, stop_grace_s=0.1))
    if "donors" not in options:
        StateDonor(endpoint, options["directory"], StateConfig(max_upload_bytes_per_s=options["rate"])).start()
    await endpoint.start()
    say({"peer": peer_fields(endpoint.peer)})
    if "donors" not in options:
        await asyncio.Event().wait()
    donors, any_state = list(map(_peer, options["donors"])), Expectation(max_bytes=1 << 40)
    fetching = asyncio.create_task(
        fetch_state(endpoint, donors, options["digest"], options["directory"], expectation=any_state, timeout_s=120)
    )
    while endpoint.counters.received_bytes < options["report_bytes"]:
        assert not fetching.done()
        await asyncio.sleep(0.02)
    say({"received_bytes": endpoint.counters.received_bytes})
    await fetching
    await endpoint.stop()


if __name__ == "__main__":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    asyncio.run(_run(json.loads(sys.argv[1])))
