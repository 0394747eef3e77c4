"""Micro-batches a second through the account, by where its journal is: this machine's disk, a store, three drivers.

Drivers lease and settle in bundles, as fast as the keeper answers; no network lies between them and the keeper, so that
what differs is the journal alone. `local` is the journal of one keeper, synced at each request; the others are written
in groups. A folder and S3 (moto, a process of its own) are also measured with 50 ms added to each put, which is what an
object store takes. The three members of a replicated journal are endpoints on 127.0.0.1 in this one process, with a
disk in common: their processor time is all counted here. Kinds take turns, so that a busy machine is as busy for all.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from scripts.trainer_bench.crew import load_average
from tests.support.s3_servers import moto_s3, speaking_to
from trainer.network.rpc import Endpoint, Identity, Peer, Request, RpcConfig
from trainer.pipeline.ledger import (
    AppliedReport,
    LaneSpec,
    Layout,
    LedgerConfig,
    LedgerService,
    LedgerSpec,
    ledger_in,
    open_ledger,
)
from trainer.pipeline.ledger import messages as asks
from trainer.pipeline.ledger.election import ReplicatedSite
from trainer.pipeline.ledger.group_commit import GroupCommitJournal
from trainer.pipeline.ledger.replica import Replica
from trainer.pipeline.ledger.replica_service import Members, ReplicaService
from trainer.pipeline.ledger.store_journal import StoreSite
from trainer.pipeline.ledger.store_place import StorePlace
from trainer.pipeline.ledger.succession import JournalSite
from trainer.pipeline.protocol.work import Settlement, StageCredit

_STAGES = ("head", "body-1", "body-2", "tail")
_SPEC = LedgerSpec(
    seed=0,
    layout=Layout(num_windows=4096, seq_len=1024, micro_batch_rows=4, unit_rows=32),
    lanes=(LaneSpec(source=None, first_shard_sha256="0" * 64),),
    stages=_STAGES,
)
_SHARDS = (range(100_000),)
_CONFIG = LedgerConfig(max_open=4096, takeover_s=30.0, lease_s=600.0)
_PUT_S = 0.05
_NAMES = ("one", "two", "three")
_BUCKET = "genesis-bench"
_GOAL_PER_S = 1000.0


class _Slow:
    """A store whose puts take so much longer."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, *args: Any, **options: Any) -> str:
        """As the store's, later."""
        time.sleep(_PUT_S)
        etag: str = self._store.put(*args, **options)
        return etag


async def _nobody(_keys: Any) -> AppliedReport:
    return AppliedReport({}, frozenset())


def bench_ledger(arguments: argparse.Namespace) -> dict[str, Any]:
    """All kinds of journals in turn."""
    folder = Path(tempfile.mkdtemp(prefix="ledger-", dir=arguments.folder if arguments.folder.exists() else None))
    report: dict[str, Any] = {
        "load": [load_average()],
        "drivers": arguments.ledger_drivers,
        "bundle": arguments.ledger_bundle,
        "kinds": {},
    }
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(moto_s3(_BUCKET))
        stack.enter_context(speaking_to(server))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for turn in range(arguments.ledger_turns):
            for name, opened in _kinds(folder / str(turn)).items():
                rates.setdefault(name, []).append(asyncio.run(_measured(opened, arguments)))
    local = median(rates["local"])
    for name, found in rates.items():
        report["kinds"][name] = {"per_s": median(found), "over_local": median(found) / local}
    report["load"].append(load_average())
    print(as_text(report))
    return report


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"micro-batches a second through the account, {report['drivers']} drivers that settle {report['bundle']} at a "
        f"time ({' to '.join(report['load'])})",
        f"  {'journal':34} {'a second':>9} {'over local':>11}   asked {_GOAL_PER_S:g} with 50 ms a put",
    ]
    for name, found in report["kinds"].items():
        lines.append(f"  {name:34} {found['per_s']:>9.0f} {found['over_local']:>11.2f}")
    return "\n".join(lines)


def _kinds(folder: Path) -> dict[str, Callable[[], Any]]:
    shared = StorePlace.of(str(folder / "shared"), "bench")
    slow = StorePlace.of(str(folder / "slow"), "bench")
    bucket, far = (StorePlace.of(f"s3://{_BUCKET}/{folder.name}-{name}", "bench") for name in ("near", "far"))
    return {
        "local": lambda: _local(folder / "local" / "journal.jsonl"),
        "folder": lambda: _in_store(shared),
        "folder, 50 ms more a put": lambda: _in_store(StorePlace(_Slow(slow.store), slow.prefix)),
        "S3 (moto)": lambda: _in_store(bucket),
        "S3 (moto), 50 ms more a put": lambda: _in_store(StorePlace(_Slow(far.store), far.prefix)),
        "replicated, three members": lambda: _replicated(folder / "members"),
    }


async def _measured(opened: Callable[[], Any], arguments: argparse.Namespace) -> float:
    async with opened() as service:
        settled = [0]
        began_s = time.perf_counter()
        until_s = began_s + arguments.ledger_s
        drivers = [
            _drive(service, f"{number:064x}", until_s, settled, arguments.ledger_bundle)
            for number in range(arguments.ledger_drivers)
        ]
        await asyncio.gather(*drivers)
        account = await service.account()
        if account.micro_batches.done != settled[0]:
            raise RuntimeError(f"expected {settled[0]} micro-batches done, found {account.micro_batches.done}")
        return settled[0] / (time.perf_counter() - began_s)


async def _drive(service: LedgerService, driver: str, until_s: float, settled: list[int], bundle: int) -> None:
    """Leases, and settles all of it in bundles, until the time is up."""
    number = 0
    while time.perf_counter() < until_s:
        token = secrets.token_hex(16)
        ask = asks.LeaseAsk(token=token, data_digest=_SPEC.digest(), num_units=16)
        leased = (await service.handle(asks.LEDGER_LEASE, Request(driver, ask))).body
        held = list(_SPEC.layout.micro_batches(*leased.runs))
        for first in range(0, len(held), bundle):
            settlements = []
            for micro_batch in held[first : first + bundle]:
                number += 1
                credits = tuple(
                    StageCredit(stage=stage, incarnation=f"{place:016x}", applied_number=number)
                    for place, stage in enumerate(_STAGES)
                )
                settlements.append(
                    Settlement(micro_batch=str(micro_batch), outcome="done", credits=credits, num_tokens=4096)
                )
            said = asks.SettleAsk(token=token, settlements=tuple(settlements))
            answer = (await service.handle(asks.LEDGER_SETTLE, Request(driver, said))).body
            settled[0] += answer.accepted


@asynccontextmanager
async def _local(path: Path) -> AsyncIterator[LedgerService]:
    ledger, journal = open_ledger(path, _SPEC, _SHARDS, _CONFIG)
    service = LedgerService(_endpoint(), ledger, journal, _CONFIG, _nobody)
    try:
        yield service
    finally:
        await service.stop()


@asynccontextmanager
async def _in_store(place: StorePlace) -> AsyncIterator[LedgerService]:
    site = StoreSite(place, "a" * 64, _CONFIG.takeover_s, may_keep=True, is_away=lambda: False)
    async with _kept(site) as service:
        yield service


@asynccontextmanager
async def _replicated(folder: Path) -> AsyncIterator[LedgerService]:
    endpoints = {name: _endpoint() for name in _NAMES}
    peers: dict[str, Peer] = {}
    names = {endpoint.peer_id: name for name, endpoint in endpoints.items()}
    async with AsyncExitStack() as stack:
        sites = []
        for place, (name, endpoint) in enumerate(endpoints.items()):
            members = Members(_NAMES, place, peers.get, names.get)
            service = ReplicaService(endpoint, Replica.open(folder / name), members, _CONFIG.takeover_s)
            sites.append(ReplicatedSite(endpoint, service, members, _CONFIG.takeover_s))
            sites[-1].register()
            await endpoint.start()
            stack.push_async_callback(endpoint.stop)
            if place:
                stack.push_async_callback(sites[-1].close)
            peers[name] = endpoint.peer
        async with _kept(sites[0]) as kept:
            yield kept


@asynccontextmanager
async def _kept(site: JournalSite) -> AsyncIterator[LedgerService]:
    taken = await site.follow()
    journal = GroupCommitJournal(taken.target, taken.digest, taken.size_bytes, _CONFIG.takeover_s, taken.confirmed_s)
    writing = asyncio.create_task(journal.run())
    ledger = ledger_in(journal, list(taken.records), _SPEC, _SHARDS, _CONFIG)
    service = LedgerService(_endpoint(), ledger, journal, _CONFIG, _nobody)
    try:
        yield service
    finally:
        await service.stop()
        await writing
        await site.close()


def _endpoint() -> Endpoint:
    return Endpoint(Identity.create(), "bench", RpcConfig(host="127.0.0.1"))
