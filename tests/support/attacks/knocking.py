"""Announcements that name a port of somebody else, so that all nodes of the run connect there.

The victim is a service of this machine, which counts who comes; no more than a few a minute may come from each node.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

from tests.support.announcements import announce
from tests.support.attacks import Target, send_record
from trainer.network.discovery.stage_report import StageReport
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.run.config import RunConfig, from_mapping, read_yaml

__all__ = ["attack"]

_NUM_IDENTITIES = 40
_MAX_KNOCKS_PER_NODE = 3.0
"""In the first minute; fewer from then on."""
_NUM_NEWCOMERS = 2
_FORBIDDEN = ("127.0.0.1:22", "10.11.12.13:4100", "169.254.169.254:4100", "0.0.0.0:4100")


async def attack(target: Target) -> None:
    """Announces 40 identities at the victim's port to every node, over and over, and counts what comes.

    Raises:
        AssertionError: too many came.
    """
    chance = random.Random(target.seed)
    run_id = from_mapping(RunConfig, read_yaml(Path(target.run_file))).run_id
    knocks = 0

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        await asyncio.sleep(1.0)
        writer.close()

    victim = await asyncio.start_server(accept, "127.0.0.77", 0)
    port = victim.sockets[0].getsockname()[1]
    rpc = RpcConfig(host=target.source_host, stop_grace_s=0.1)
    liars = [Endpoint(Identity.create(), run_id, rpc) for _ in range(_NUM_IDENTITIES)]
    until_s = time.monotonic() + target.seconds
    announced = 0
    while time.monotonic() < until_s:
        for number, liar in enumerate(liars):
            name = chance.choice(list(target.addresses))
            address = _FORBIDDEN[number // 4 % 4] if number % 4 == 0 else f"127.0.0.77:{port}"
            uid = f"body1.0.{100 + number}"
            wire = announce(
                liar.identity,
                lifetime_s=3600.0,
                node_id=f"liar-{number}",
                run_id=run_id,
                address=address,
                stage=StageReport(uid=uid, incarnation="0" * 16, status="serving"),
            )
            announced += await send_record(liar, target.peer(name), wire)
    for liar in liars:
        await liar.stop()
    victim.close()
    print(json.dumps({"announced": announced, "knocks": knocks}))  # noqa: T201
    num_nodes = len(target.addresses) + _NUM_NEWCOMERS
    allowed = _MAX_KNOCKS_PER_NODE * num_nodes * max(1.0, target.seconds / 60.0)
    assert announced >= _NUM_IDENTITIES
    assert 0 < knocks <= allowed, f"expected at most {allowed:.0f} knocks by {num_nodes} nodes, found {knocks}"
