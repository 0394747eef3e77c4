"""An endpoint under the attacks of `tests.support.attacks`, beside newcomers of the same address; few connections.

The whole swarm under each of them is in tests/trainer/attacks.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.attacks import Target
from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import RUN_ID, Answer, Question
from tests.support.rpc_pair import running_endpoint
from trainer.errors import RpcError
from trainer.network.discovery.exchange import EXCHANGE_METHOD, PeerExchangeRequest
from trainer.network.rpc import Endpoint, Reply, Request

_OPTIONS = {"tls": True, "heartbeat_s": 1.0, "stall_timeout_s": 6.0, "max_connections": 256}
_SECONDS = 10.0
_IN_WITHIN_S = 10.0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["no_window", "idle_connections"])
@on_event_loop
async def test_newcomers_and_proven_peers_get_in(name: str, tmp_path: Path) -> None:
    async with running_endpoint(**_OPTIONS) as victim, running_endpoint(**_OPTIONS) as proven:
        victim.register(EXCHANGE_METHOD, PeerExchangeRequest, _answer, any_recipient=True)
        await victim.call(proven.peer, "test/echo", Question(), Answer, timeout_s=20)
        (tmp_path / "run.yaml").write_text(f"run_id: {RUN_ID}\n", encoding="utf-8")
        target = Target(
            run_file=str(tmp_path / "run.yaml"),
            addresses={"driver-1": victim.address},
            peer_ids={"driver-1": victim.peer_id},
            apis={},
            seconds=_SECONDS,
            source_host="127.0.0.1",
            niceness=0,  # Beside other tests a nice attack would hardly begin.
        )
        target.save(tmp_path / "target.json")
        command = ["-m", "tests.support.attacks", name, str(tmp_path / "target.json")]
        attack = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        ended = asyncio.create_task(attack.communicate())
        loop = asyncio.get_running_loop()
        waits_s, refused = [], 0
        while not ended.done():
            begun_s = loop.time()
            async with running_endpoint(**_OPTIONS) as newcomer:
                await _gets_in(newcomer, victim)
            waits_s.append(loop.time() - begun_s)
            for _ in range(5):
                refused += not await _is_answered(proven, victim)
            await asyncio.sleep(0.1)
        said, _ = await ended
        assert attack.returncode == 0
        assert max(waits_s) <= _IN_WITHIN_S, (waits_s, said)
        assert not refused, (refused, waits_s, said)


async def _answer(_request: Request[PeerExchangeRequest]) -> Reply[Answer]:
    return Reply(Answer())


async def _is_answered(caller: Endpoint, victim: Endpoint) -> bool:
    try:
        await caller.call(victim.peer, "test/echo", Question(), Answer, timeout_s=20)
    except RpcError:
        return False
    return True


async def _gets_in(newcomer: Endpoint, victim: Endpoint) -> None:
    async with asyncio.timeout(30.0):
        while not await _is_answered(newcomer, victim):
            await asyncio.sleep(0.2)
