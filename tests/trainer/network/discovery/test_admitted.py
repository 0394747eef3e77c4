"""Discovery in a run with an authority: members find each other, in the role they were admitted in, until revoked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.support.announcements import announcement
from tests.support.rpc_node import RUN_ID, fast_config
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.stage_report import PartReport, StageReport
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc import Admission, Credential, Endpoint, Identity, RevokedPeers
from trainer.network.rpc.credential import Role

_AUTHORITY = Identity.create()
_QUICK = DiscoveryConfig(
    announcement_lifetime_s=30.0, poll_interval_s=0.1, announce_interval_s=0.5, max_retry_interval_s=0.5
)
_REPORT = StageReport(uid="head.0.42", incarnation="0" * 16, status="serving")
_PARTS = tuple(PartReport(stage=stage, status="serving") for stage in ("head", "tail"))


@dataclass
class _Node:
    endpoint: Endpoint
    discovery: StaticDiscovery

    async def knows(self) -> set[str]:
        return {found.node_id for found in await self.discovery.peers()}


@asynccontextmanager
async def _node(
    name: str,
    *addresses: str,
    role: Role | None,
    stage: StageReport | None = None,
    admitted_to: str | None = None,
    parts: tuple[PartReport, ...] = (),
) -> AsyncIterator[_Node]:
    identity, admission = Identity.create(), None
    if role is not None:
        admission = Admission(RUN_ID, [_AUTHORITY.peer_id])
        now = time.time()
        admission.take_own(Credential.issue(_AUTHORITY, RUN_ID, identity.peer_id, role, admitted_to, now, 600.0))
    endpoint = Endpoint(identity, RUN_ID, fast_config(), admission)
    await endpoint.start()
    discovery = StaticDiscovery(endpoint, addresses, _QUICK, keeps_callers=True)
    await discovery.start()
    said = {"node_id": name, "run_id": RUN_ID, "address": endpoint.address, "stage": stage, "parts": parts}
    await discovery.announce(announcement(identity, **said))
    try:
        yield _Node(endpoint, discovery)
    finally:
        await discovery.close()
        await endpoint.stop()


async def _until_known(node: _Node, *names: str) -> None:
    async with asyncio.timeout(20.0):
        while await node.knows() != set(names):
            await asyncio.sleep(0.05)


async def test_members_are_found_strangers_and_false_roles_are_not_and_the_revoked_are_gone_at_once() -> None:
    async with (
        _node("worker", role="worker", stage=_REPORT) as worker,
        _node("driver", worker.endpoint.address, role="driver") as driver,
        _node("whole", worker.endpoint.address, role="node", parts=_PARTS) as whole,
        _node("whole as driver", worker.endpoint.address, role="node"),
        _node("driver as whole", worker.endpoint.address, role="driver", parts=_PARTS),
        _node("worker as whole", worker.endpoint.address, role="worker", parts=_PARTS),
        _node("worker as driver", worker.endpoint.address, role="worker"),
        _node("driver as worker", worker.endpoint.address, role="driver", stage=_REPORT),
        _node("monitor as driver", worker.endpoint.address, role="monitor"),
        _node("worker of the tail", worker.endpoint.address, role="worker", stage=_REPORT, admitted_to="tail"),
        _node("stranger", worker.endpoint.address, role=None) as stranger,
    ):
        await _until_known(driver, "worker", "whole")
        await _until_known(worker, "driver", "whole")
        await _until_known(whole, "driver", "worker")
        await asyncio.sleep(1.0)  # For the others to be heard of, if they were believed.
        assert await driver.knows() == {"worker", "whole"}
        assert await worker.knows() == {"driver", "whole"}
        assert await stranger.knows() == set()
        admission = worker.endpoint.admission
        assert admission is not None
        admission.revoke(RevokedPeers.issue(_AUTHORITY, RUN_ID, 1, [driver.endpoint.peer_id], time.time()))
        assert await worker.knows() == {"whole"}
        assert all(said.peer_id != driver.endpoint.peer_id for said in worker.discovery.heard())


async def test_a_worker_that_moved_is_found_again_by_its_new_credential() -> None:
    """At the same address and under the same key, once it has shown what admits it to the other stage."""
    async with (
        _node("worker", role="worker", stage=_REPORT, admitted_to="head") as worker,
        _node("driver", worker.endpoint.address, role="driver") as driver,
    ):
        await _until_known(driver, "worker")
        identity, address = worker.endpoint.identity, worker.endpoint.address
        await worker.discovery.close()
        await worker.endpoint.stop()
        admission, now = Admission(RUN_ID, [_AUTHORITY.peer_id]), time.time()
        admission.take_own(Credential.issue(_AUTHORITY, RUN_ID, identity.peer_id, "worker", "tail", now, 600.0))
        endpoint = Endpoint(identity, RUN_ID, fast_config(port=int(address.rpartition(":")[2])), admission)
        await endpoint.start()
        discovery = StaticDiscovery(endpoint, [driver.endpoint.address], _QUICK, keeps_callers=True)
        await discovery.start()
        report = _REPORT.model_copy(update={"uid": "tail.0.42"})
        moved = announcement(identity, node_id="moved", run_id=RUN_ID, address=address, stage=report)
        await discovery.announce(moved)
        try:
            await _until_known(driver, "moved")
        finally:
            await discovery.close()
            await endpoint.stop()
