"""Drivers that may keep an account, as processes that tests kill with their disks, stop, continue and replace.

What may be lost at once is one machine: a replicated journal has to have brought its copy up to date before the next.

Each process is told over its standard input who else there is, and where; it drives nothing. `Succession` keeps so many
of them alive and finds the keeper as a driver does that may not keep the account itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.child import Child, say
from tests.support.ledger_run import CONFIG, Run, run_of
from tests.support.rpc_node import RUN_ID, fast_config
from trainer.network.rpc import Endpoint, Peer, PeerId
from trainer.network.rpc.identity import load_or_create_identity
from trainer.pipeline.ledger import KeeperSeat, LedgerConfig, LedgerService, ledger_in
from trainer.pipeline.ledger.election import ReplicatedSite
from trainer.pipeline.ledger.group_commit import AccountJournal
from trainer.pipeline.ledger.records import Record
from trainer.pipeline.ledger.replica import Replica
from trainer.pipeline.ledger.replica_service import Members, ReplicaService
from trainer.pipeline.ledger.store_journal import StoreSite
from trainer.pipeline.ledger.store_place import StorePlace
from trainer.pipeline.ledger.succession import JournalSite

NAMES = ("driver-1", "driver-2", "driver-3")
TAKEOVER_S = 2.0
SEAT_CONFIG = replace(CONFIG, compact_bytes=1 << 12, epochs=100_000, takeover_s=TAKEOVER_S, lease_s=60.0)
KEY_FOLDER = "keys"
_BEGIN_S = 300.0
"""For a process to import everything, three at once on a busy machine."""


def site_of(
    journal: str, endpoint: Endpoint, peers: Mapping[str, Peer], own: str | None, disk: Path, takeover_s: float
) -> JournalSite:
    """The journal as a driver of that name sees it; one without a name only follows."""
    if journal != "replicated":
        place = StorePlace.of(journal, "seats")
        return StoreSite(place, endpoint.peer_id, takeover_s, may_keep=own is not None, is_away=lambda: True)

    def name_of(key: PeerId) -> str | None:
        return next((name for name, peer in peers.items() if peer.peer_id == key), None)

    members = Members(NAMES, None if own is None else NAMES.index(own), peers.get, name_of)
    service = None
    if own is not None:
        service = ReplicaService(endpoint, Replica.open(disk / "replica"), members, takeover_s)
    return ReplicatedSite(endpoint, service, members, takeover_s)


def seat_of(run: Run, endpoint: Endpoint, site: JournalSite, config: LedgerConfig) -> KeeperSeat:
    def make(journal: AccountJournal, records: list[Record]) -> LedgerService:
        ledger = ledger_in(journal, records, run.spec, run.shards, config)
        return LedgerService(endpoint, ledger, journal, config, run.workers)

    return KeeperSeat(endpoint, site, config.takeover_s, make)


class SeatProcess(Child):
    """A driver of that name, which only imports until it is to begin."""

    def __init__(self, folder: Path, name: str, journal: str) -> None:
        self.name = name
        self.disk = folder / "disks" / name
        self.log_file = folder / f"{name}.log"
        self.peer = Peer(None, "")
        super().__init__("keeper_seats", folder, name, journal, log=self.log_file)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def may_be_lost(self) -> bool:
        """Whether its copy of the journal, if it has one, counts again."""
        try:
            with (self.disk / "replica" / "journal").open("rb") as file:
                return bool(json.loads(file.readline())["is_voter"])
        except (OSError, ValueError):
            return False

    def begin(self) -> None:
        self.say("go")
        peer_id, address = self.hear(_BEGIN_S)
        self.peer = Peer(peer_id, address)

    def arm(self, crash_at: str) -> None:
        """From now on it kills itself when it passes that point so often; empty: it does not."""
        with suppress(BrokenPipeError):
            self.say({"crash_at": crash_at})


class Succession:
    """Drivers of a run; those that die lose their disks, and others of the same name and key take their places."""

    def __init__(self, folder: Path, run: Run, journal: str) -> None:
        self.folder, self.run, self.journal = folder, run, journal
        self.seats: dict[str, SeatProcess] = {}
        self._spares: dict[str, SeatProcess] = {}
        self.peers: dict[str, Peer] = {}

    def begin(self, names: Sequence[str] = NAMES) -> None:
        self._spares |= {name: SeatProcess(self.folder, name, self.journal) for name in names}
        for name in names:
            self._place(name)
        self.tell_all()

    def _place(self, name: str) -> None:
        seat = self._spares.pop(name)
        seat.begin()
        self.seats[name], self.peers[name] = seat, seat.peer

    def tell_all(self) -> None:
        known = {name: [peer.peer_id, peer.address] for name, peer in self.peers.items()}
        for seat in self.seats.values():
            with suppress(BrokenPipeError):  # It has just died.
                seat.say({"peers": known})

    def prepare_spares(self) -> None:
        """Has those import that take the next places."""
        for name in self.seats:
            if name not in self._spares:
                self._spares[name] = SeatProcess(self.folder, name, self.journal)

    @property
    def is_whole(self) -> bool:
        """Whether any one of them may be lost now."""
        seats = self.seats.values()
        return all(seat.is_alive and (self.journal != "replicated" or seat.may_be_lost) for seat in seats)

    def replace(self, name: str, *, with_disk: bool = True) -> None:
        """One that died is replaced by another of that name; its disk is gone too, unless that is all it has left."""
        old = self.seats.pop(name)
        old.__exit__()
        if with_disk:
            shutil.rmtree(old.disk, ignore_errors=True)
        self.prepare_spares()
        if name not in self._spares:
            self._spares[name] = SeatProcess(self.folder, name, self.journal)
        self._place(name)
        self.tell_all()

    def close(self) -> None:
        for seat in (*self.seats.values(), *self._spares.values()):
            seat.__exit__()

    def named(self, key: PeerId | None) -> SeatProcess | None:
        return next((seat for seat in self.seats.values() if seat.peer.peer_id == key), None)

    @asynccontextmanager
    async def followed(self, endpoint: Endpoint) -> AsyncIterator[JournalSite]:
        """The journal as a driver sees it that may not keep it."""
        site = site_of(self.journal, endpoint, self.peers, None, self.folder, TAKEOVER_S)
        following = asyncio.create_task(site.follow())
        try:
            yield site
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await site.close()

    def peer_of(self, key: PeerId | None) -> Peer | None:
        return next((peer for peer in self.peers.values() if peer.peer_id == key), None)


@contextmanager
def succession(folder: Path, run: Run, journal: str) -> Iterator[Succession]:
    found = Succession(folder, run, journal)
    try:
        yield found
    finally:
        found.close()


async def _serve(folder: Path, name: str, journal: str) -> None:
    await asyncio.to_thread(sys.stdin.readline)
    run = run_of(folder / "store", folder / "cache" / name, folder / "unused")
    keys = folder / KEY_FOLDER
    keys.mkdir(exist_ok=True)
    endpoint = Endpoint(load_or_create_identity(keys / f"{name}.key"), RUN_ID, fast_config())
    peers: dict[str, Peer] = {}
    site = site_of(journal, endpoint, peers, name, folder / "disks" / name, TAKEOVER_S)
    seat = seat_of(run, endpoint, site, SEAT_CONFIG)
    seat.register()
    await endpoint.start()
    loop, told, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def learn(found: dict[str, Any]) -> None:
        if "crash_at" in found:
            os.environ["GENESIS_CRASH_AT"] = found["crash_at"]
            return
        peers.update({name: Peer(*peer) for name, peer in found["peers"].items()})
        told.set()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(learn, json.loads(line))
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    say([endpoint.peer_id, endpoint.address])
    await told.wait()
    await seat.start()
    ending = asyncio.create_task(ended.wait())
    failing = asyncio.create_task(seat.ended())
    await asyncio.wait({ending, failing}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        failing.result()
    failing.cancel()
    await seat.stop()
    await endpoint.stop()


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(_serve(Path(sys.argv[1]), *sys.argv[2:]))
