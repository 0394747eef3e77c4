"""What reporting and being watched cost a node: processor time and bytes, beside the limits of 1 % and 1 kB/s.

Nodes with real endpoints and peer exchange in one process, first without reports, then with: full ones (four rounds
each), thirty times as often as by default, told to three peers, and read by a monitor as often. The difference between
the two, by node and report, is what a report a minute costs; the monitor's own time is in it, which is an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from scripts.trainer_bench.crew import load_average
from trainer.network.discovery.announcement import Announcement
from trainer.network.discovery.config import DiscoveryConfig
from trainer.network.discovery.node_report import NodeReport, ReportedRound
from trainer.network.discovery.report_exchange import REPORT_INTERVAL_S, ReportExchange
from trainer.network.discovery.static import StaticDiscovery
from trainer.network.rpc import Endpoint, Identity, RpcConfig
from trainer.run.config import RunConfig
from trainer.run.monitoring.watcher import RunWatcher

LIMIT_SHARE: Final = 0.01
LIMIT_BYTES_PER_S: Final = 1000.0
_INTERVAL_S = 2.0
_SETTLE_S = 6.0
_RUN_ID = "bench"


@dataclass(frozen=True, slots=True)
class _Cost:
    cpu_s: float
    sent_bytes: int
    received_bytes: int
    seconds: float


def _report(peer_id: str) -> NodeReport:
    rounds = tuple(
        ReportedRound(
            round_index=number,
            ended_at=time.time(),
            num_members=8,
            completeness=1.0,
            seconds=12.345678,
            agree_s=1.234567,
            reduce_s=9.876543,
            vote_s=0.123456,
            sent_bytes=123_456_789,
            received_bytes=123_456_789,
        )
        for number in range(4)
    )
    return NodeReport(
        peer_id=peer_id,
        node_id=f"node-{peer_id[:8]}",
        run_id=_RUN_ID,
        role="node",
        incarnation="0" * 16,
        software="0.0.0",
        began_at=time.time(),
        flops=1.234567e20,
        num_tokens=1_234_567_890,
        num_steps=123_456,
        active_s=123_456.789,
        rounds=rounds,
        loss=3.456789,
        memory_bytes=12_345_678_901,
    )


async def _measured(num_nodes: int, seconds: float, *, reports: bool) -> _Cost:
    config = DiscoveryConfig(allow_private=True)
    async with AsyncExitStack() as stack:
        endpoints: list[Endpoint] = []
        for _ in range(num_nodes):
            endpoint = Endpoint(Identity.create(), _RUN_ID, RpcConfig(host="127.0.0.1", stop_grace_s=0.1))
            discovery = StaticDiscovery(endpoint, [it.address for it in endpoints[:1]], config)
            exchange = ReportExchange(
                endpoint, discovery, lambda key=endpoint.peer_id: _report(key), interval_s=_INTERVAL_S
            )
            if reports:
                exchange.register()
            await endpoint.start()
            stack.push_async_callback(endpoint.stop)
            await discovery.start()
            stack.push_async_callback(discovery.close)
            said = Announcement(
                peer_id=endpoint.peer_id,
                node_id=f"node-{endpoint.peer_id[:8]}",
                run_id=_RUN_ID,
                address=endpoint.address,
                certificate_pem=(endpoint.certificate or b"").decode(),
            )
            await discovery.announce(said)
            endpoints.append(endpoint)
            if reports:
                task = asyncio.create_task(exchange.run())
                stack.callback(task.cancel)
        if reports:
            watched = DiscoveryConfig(allow_private=True, initial_peers=(endpoints[0].address,))
            rpc = RpcConfig(host="127.0.0.1", stop_grace_s=0.1)
            watcher = RunWatcher(
                RunConfig(node_id="monitor", run_id=_RUN_ID, discovery=watched, rpc=rpc), Identity.create()
            )
            await watcher.start()
            stack.push_async_callback(watcher.stop)
            task = asyncio.create_task(_look_on(watcher))
            stack.callback(task.cancel)
        await asyncio.sleep(_SETTLE_S)
        before = [(it.counters.sent_bytes, it.counters.received_bytes) for it in endpoints]
        cpu_s, began_s = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        cpu_s, passed_s = time.process_time() - cpu_s, time.monotonic() - began_s
        sent = sum(it.counters.sent_bytes - was for it, (was, _) in zip(endpoints, before, strict=True))
        received = sum(it.counters.received_bytes - was for it, (_, was) in zip(endpoints, before, strict=True))
        return _Cost(cpu_s, sent, received, passed_s)


async def _look_on(watcher: RunWatcher) -> None:
    while True:
        await watcher.look()
        await asyncio.sleep(_INTERVAL_S)


def bench_monitor(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures both and returns what a report a minute costs a node."""
    num_nodes, seconds = arguments.monitor_nodes, arguments.monitor_s
    report: dict[str, Any] = {"nodes": num_nodes, "load": [load_average()]}
    without = asyncio.run(_measured(num_nodes, seconds, reports=False))
    with_reports = asyncio.run(_measured(num_nodes, seconds, reports=True))
    reports_each = with_reports.seconds / _INTERVAL_S
    cpu_s = max(0.0, with_reports.cpu_s - without.cpu_s) / num_nodes / reports_each
    sent = max(0, with_reports.sent_bytes - without.sent_bytes) / num_nodes / reports_each
    received = max(0, with_reports.received_bytes - without.received_bytes) / num_nodes / reports_each
    report |= {
        "cpu_ms_a_report": round(1e3 * cpu_s, 2),
        "cpu_share": round(cpu_s / REPORT_INTERVAL_S, 6),
        "sent_bytes_per_s": round(sent / REPORT_INTERVAL_S, 1),
        "received_bytes_per_s": round(received / REPORT_INTERVAL_S, 1),
        "discovery_cpu_share": round(without.cpu_s / num_nodes / without.seconds, 5),
        "discovery_bytes_per_s": round((without.sent_bytes + without.received_bytes) / num_nodes / without.seconds, 1),
    }
    report["of_the_limit_cpu"] = round(report["cpu_share"] / LIMIT_SHARE, 4)
    both = report["sent_bytes_per_s"] + report["received_bytes_per_s"]
    report["of_the_limit_bytes"] = round(both / LIMIT_BYTES_PER_S, 3)
    report["load"].append(load_average())
    print(as_text(report))
    return report


def as_text(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    return "\n".join(
        [
            f"a report a minute, read by a monitor, {report['nodes']} nodes   ({' to '.join(report['load'])})",
            f"  processor: {report['cpu_ms_a_report']:.2f} ms, {100 * report['cpu_share']:.4f} % of a core: "
            f"{report['of_the_limit_cpu']:.3f} of the 1 % asked "
            f"(discovery: {100 * report['discovery_cpu_share']:.2f} %)",
            f"  traffic: {report['sent_bytes_per_s']:.0f} B/s out, {report['received_bytes_per_s']:.0f} B/s in: "
            f"{report['of_the_limit_bytes']:.2f} of the 1 kB/s asked "
            f"(discovery: {report['discovery_bytes_per_s']:,.0f} B/s)",
        ]
    )
