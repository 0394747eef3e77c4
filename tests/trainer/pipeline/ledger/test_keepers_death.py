"""Keepers that die with their disks, or stand still and come back: another driver goes on, and the account adds up.

Keepers are processes (`tests.support.keeper_seats`) that kill themselves behind a write, by a seeded plan; so does a
driver that is about to take over. Two drivers work on, in this process.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.support.keeper_seats import SEAT_CONFIG, SeatProcess, Succession, succession
from tests.support.ledger_cast import done
from tests.support.ledger_run import Run, ledger_run
from tests.support.rpc_node import running_endpoint
from tests.support.s3_servers import moto_s3, speaking_to
from trainer.errors import RefusedError, RpcError
from trainer.network.rpc import Endpoint
from trainer.pipeline.ledger import LEDGER_ACCOUNT, Account, LedgerClient
from trainer.pipeline.ledger.messages import LEDGER_RENEW, AccountAsk, RenewAnswer, RenewAsk
from trainer.pipeline.ledger.replicated_journal import REPLICATED_CRASH_POINTS
from trainer.pipeline.ledger.store_journal import JOURNAL_CRASH_POINTS
from trainer.pipeline.ledger.succession import JournalSite
from trainer.pipeline.protocol.work import MicroBatchId

BUCKET = "genesis"
MODES = ("folder", "s3", "replicated")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return ledger_run(tmp_path)


@pytest.fixture(params=MODES)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        with moto_s3(BUCKET) as server, speaking_to(server):
            yield f"s3://{BUCKET}/run"
    else:
        yield {"folder": str(tmp_path / "shared"), "replicated": "replicated"}[request.param]


AT_TAKEOVER = ("journal-taken", "journal-promised", "journal-installed")


def crash_plan(journal: str, count: int, seed: int) -> list[str]:
    """Where keepers kill themselves: every place in turn, each at a seeded time that it is passed."""
    places = REPLICATED_CRASH_POINTS if journal == "replicated" else JOURNAL_CRASH_POINTS
    draw = random.Random(seed)
    found = [places[n % len(places)] for n in range(count)]
    draw.shuffle(found)
    return [place if place in AT_TAKEOVER else f"{place}:{draw.randint(1, 6)}" for place in found]


class Drivers:
    """Two drivers that settle all they get, until they are to end."""

    def __init__(self) -> None:
        self.found: list[MicroBatchId] = []
        self.settled = 0
        self.clients: list[LedgerClient] = []
        self.ending = asyncio.Event()

    async def drive(self, client: LedgerClient) -> None:
        while not self.ending.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    micro_batch = await client.next()
                    assert micro_batch is not None
                    self.found.append(micro_batch.id)
                    client.settle(done(micro_batch.id, len(self.found), tokens=micro_batch.num_tokens))
            await asyncio.sleep(0.01)


@asynccontextmanager
async def driving(run: Run, keepers: Succession) -> AsyncIterator[tuple[Drivers, JournalSite, Endpoint]]:
    drivers = Drivers()
    async with running_endpoint() as one, running_endpoint() as two, keepers.followed(one) as site:
        clients = [
            LedgerClient(each, lambda: keepers.peer_of(site.keeper), run.rows(), run.spec, SEAT_CONFIG)
            for each in (one, two)
        ]
        drivers.clients = clients
        for client in clients:
            await client.start()
        tasks = [asyncio.create_task(drivers.drive(client)) for client in clients]
        try:
            yield drivers, site, one
        finally:
            drivers.ending.set()
            await asyncio.gather(*tasks)
            for client in clients:
                await client.close()


async def account_of(keepers: Succession, site: JournalSite, endpoint: Endpoint) -> Account:
    """As whoever keeps it says, as soon as somebody does."""
    async with asyncio.timeout(120):
        while True:
            peer = keepers.peer_of(site.keeper)
            if peer is not None:
                with suppress(RpcError):
                    reply = await endpoint.call(peer, LEDGER_ACCOUNT, AccountAsk(), Account, timeout_s=5.0)
                    return reply.body
            await asyncio.sleep(0.1)


def check_account(drivers: Drivers, account: Account) -> None:
    tally = account.micro_batches
    assert len(drivers.found) == len(set(drivers.found)), "one was given to two drivers"
    assert tally.leased == tally.done + tally.lost + tally.open
    assert tally.lost <= 0.01 * (tally.open + len(drivers.found))
    assert tally.done + tally.lost == len(drivers.found)
    assert (tally.open, account.leases) == (account.waiting, 0)
    for client in drivers.clients:
        assert (client.stale, client.refused, client.cache.num_unreported) == (0, 0, 0)


async def keeper_in(keepers: Succession, site: JournalSite) -> SeatProcess:
    """The keeper, once everything is as it was: any machine may be lost."""
    async with asyncio.timeout(240):
        while True:
            keeper = keepers.named(site.keeper)
            if keepers.is_whole and keeper is not None:
                return keeper
            await asyncio.sleep(0.02)


async def given(drivers: Drivers, count: int, unless: Callable[[], bool] = lambda: False) -> None:
    """Waits until drivers were given so many more, or the other thing holds."""
    until = len(drivers.found) + count
    async with asyncio.timeout(240):
        while len(drivers.found) < until and not unless():
            await asyncio.sleep(0.02)


async def lose_a_machine(
    keepers: Succession, drivers: Drivers, site: JournalSite, place: str, draw: random.Random
) -> None:
    """The keeper dies at a place, with its disk; or the one that is about to take over from it does."""
    keeper = await keeper_in(keepers, site)
    victim = keeper
    if place in AT_TAKEOVER:
        victim = draw.choice([seat for seat in keepers.seats.values() if seat is not keeper])
        victim.arm(place)
        keeper.kill()
        before = victim.peer.peer_id
        others = [seat.peer.peer_id for seat in keepers.seats.values() if seat not in (keeper, victim)]
        async with asyncio.timeout(240):
            while victim.is_alive and site.keeper not in (before, *others):
                await asyncio.sleep(0.02)
        await given(drivers, 20, lambda: not victim.is_alive)
    else:
        victim.arm(place)
        await given(drivers, draw.randint(60, 200), lambda: not victim.is_alive)
    if victim.is_alive:  # It never came to that place.
        victim.kill()
    for seat in keepers.seats.values():
        seat.arm("")
    if victim is not keeper:
        await asyncio.to_thread(keepers.replace, keeper.name, with_disk=False)
    await asyncio.to_thread(keepers.replace, victim.name)


async def outlive(run: Run, keepers: Succession, places: Sequence[str], seed: int) -> None:
    draw = random.Random(seed)
    async with driving(run, keepers) as (drivers, site, endpoint):
        await asyncio.to_thread(keepers.prepare_spares)
        for place in places:
            await lose_a_machine(keepers, drivers, site, place, draw)
        await given(drivers, 40)
        drivers.ending.set()
        for client in drivers.clients:
            async with asyncio.timeout(120):
                while client.cache.num_unreported:
                    await asyncio.sleep(0.05)
        for client in drivers.clients:
            await client.close()
        check_account(drivers, await account_of(keepers, site, endpoint))


@pytest.mark.slow
def test_another_driver_goes_on_where_a_keeper_died_with_its_disk(journal: str, run: Run, tmp_path: Path) -> None:
    with succession(tmp_path, run, journal) as keepers:
        keepers.begin()
        asyncio.run(outlive(run, keepers, crash_plan(journal, 2, seed=1), seed=1))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_keepers_die_with_their_disks_at_twenty_places(journal: str, run: Run, tmp_path: Path) -> None:
    with succession(tmp_path, run, journal) as keepers:
        keepers.begin()
        asyncio.run(outlive(run, keepers, crash_plan(journal, 20, seed=2), seed=2))


async def refusal_of(keeper: SeatProcess, endpoint: Endpoint) -> str:
    """Why a driver that kept the account once does not answer for it: as soon as it says no."""
    async with asyncio.timeout(60):
        while True:
            try:
                ask = RenewAsk(tokens=("0" * 32,))
                await endpoint.call(keeper.peer, LEDGER_RENEW, ask, RenewAnswer, timeout_s=5.0)
            except RefusedError as error:
                return error.reason
            except RpcError:
                await asyncio.sleep(0.1)
            else:
                raise AssertionError("it answered for an account that another driver keeps")


@pytest.mark.slow
def test_a_keeper_that_stood_still_is_refused_when_it_goes_on(journal: str, run: Run, tmp_path: Path) -> None:
    async def stand_still(keepers: Succession) -> None:
        async with driving(run, keepers) as (drivers, site, endpoint):
            async with asyncio.timeout(60):
                while len(drivers.found) < 20:
                    await asyncio.sleep(0.02)
            former = keepers.named(site.keeper)
            assert former is not None
            former.stop()
            before = len(drivers.found)
            async with asyncio.timeout(60):
                while keepers.named(site.keeper) in (former, None) or len(drivers.found) < before + 200:
                    await asyncio.sleep(0.05)
            former.resume()
            assert await refusal_of(former, endpoint) in ("not-keeper", "account")
            async with asyncio.timeout(60):
                while "keeps the account no more" not in former.log_file.read_text():
                    await asyncio.sleep(0.1)
            assert await refusal_of(former, endpoint) == "not-keeper"
            drivers.ending.set()
            for client in drivers.clients:
                await client.close()
            check_account(drivers, await account_of(keepers, site, endpoint))

    with succession(tmp_path, run, journal) as keepers:
        keepers.begin()
        asyncio.run(stand_still(keepers))
