"""The journal on several drivers' disks: most have what was acknowledged, whoever dies, forgets or is cut off."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.event_loop import on_event_loop
from tests.support.rpc_node import RUN_ID, fast_config
from tests.support.waiting import until
from trainer.errors import JournalLostError, LedgerError, RefusedError
from trainer.network.rpc import Endpoint, Identity, Peer
from trainer.pipeline.ledger.election import ReplicatedSite
from trainer.pipeline.ledger.group_commit import GroupCommitJournal
from trainer.pipeline.ledger.journal_lines import SEED, decode_lines, encode_line
from trainer.pipeline.ledger.records import Record, Workers
from trainer.pipeline.ledger.replica import Replica
from trainer.pipeline.ledger.replica_service import (
    PROMISE,
    WRITE,
    Members,
    PromiseAnswer,
    PromiseAsk,
    ReplicaService,
    WriteAnswer,
    WriteAsk,
)
from trainer.pipeline.ledger.succession import TakenJournal

NAMES = ("north", "south", "west")
TAKEOVER_S = 0.5


def note(version: int) -> Workers:
    return Workers(version=version)


def lines_of(*records: Record, before: str = SEED) -> tuple[bytes, str]:
    lines = b""
    for record in records:
        line, before = encode_line(record, before)
        lines += line
    return lines, before


# -- a member's copy ---------------------------------------------------------------------------------------------------


def test_a_copy_follows_the_highest_ballot_and_takes_only_what_follows_its_lines(tmp_path: Path) -> None:
    copy = Replica.open(tmp_path)
    first, after_first = lines_of(note(1), note(2))
    assert copy.append(4, 0, SEED, first, 2, as_voter=False)
    assert not copy.promise(4)
    second, after_second = lines_of(note(3), before=after_first)
    assert not copy.append(3, 2, after_first, second, 1, as_voter=True), "of a lower ballot"
    assert not copy.append(4, 1, after_first, second, 1, as_voter=True), "of another place"
    assert not copy.append(4, 2, SEED, second, 1, as_voter=True), "behind other lines"
    assert not copy.append(4, 2, after_first, second[:-1], 1, as_voter=True), "cut"
    assert copy.append(4, 2, after_first, second, 1, as_voter=False)
    assert copy.promise(9)
    assert not copy.append(4, 3, after_second, b"", 0, as_voter=True)
    state = copy.state()
    assert (state.promised, state.accepted, state.index, state.digest) == (9, 4, 3, after_second)
    assert not state.is_voter
    copy.close()
    copy = Replica.open(tmp_path)
    assert copy.state() == state
    assert copy.append(9, 3, after_second, b"", 0, as_voter=True)
    snapshot, after_snapshot = lines_of(note(99))
    assert copy.install(10, 4, snapshot, as_voter=False)
    assert copy.lines()[0] == snapshot
    assert (copy.state().index, copy.state().digest, copy.state().is_voter) == (4, after_snapshot, True)
    with pytest.raises(LedgerError, match="another process that has"):
        Replica.open(tmp_path)
    copy.close()


@given(st.integers(1, 6), st.data())
def test_a_copy_whose_last_line_was_not_written_to_its_end_has_those_before(tmp_path_factory, count, data):
    folder = tmp_path_factory.mktemp("copy")
    copy = Replica.open(folder)
    digest = SEED
    for number in range(count):
        line, after = lines_of(note(number), before=digest)
        assert copy.append(1, number, digest, line, 1, as_voter=True)
        last, digest = (line, digest), after
    copy.close()
    cut = data.draw(st.integers(1, len(last[0])))
    file = folder / "journal"
    file.write_bytes(file.read_bytes()[:-cut])
    copy = Replica.open(folder)
    assert (copy.state().index, copy.state().digest) == (count - 1, last[1])
    assert copy.append(1, count - 1, last[1], last[0], 1, as_voter=False)
    assert decode_lines(copy.lines()[0], "copy")[0] == [note(number) for number in range(count)]
    copy.close()


@pytest.mark.parametrize("file", ["journal", "promised"])
def test_a_damaged_copy_is_refused(file: str, tmp_path: Path) -> None:
    copy = Replica.open(tmp_path)
    lines, _ = lines_of(note(1), note(2), note(3))
    assert copy.append(1, 0, SEED, lines, 3, as_voter=True)
    copy.close()
    path = tmp_path / file
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":7') if file == "journal" else b"{")
    with pytest.raises(LedgerError, match=f"{tmp_path / file}, found it damaged; remove the folder"):
        Replica.open(tmp_path)


def test_a_disk_that_was_full_for_a_while_leaves_no_torn_line_behind(tmp_path, monkeypatch):
    copy = Replica.open(tmp_path)
    first, after_first = lines_of(note(1))
    assert copy.append(1, 0, SEED, first, 1, as_voter=True)
    second, _ = lines_of(note(2), before=after_first)

    def torn(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:5])
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("trainer.pipeline.ledger.replica._write", torn)
        with pytest.raises(OSError, match="no space"):
            copy.append(1, 1, after_first, second, 1, as_voter=True)
    assert copy.append(1, 1, after_first, second, 1, as_voter=True)
    copy.close()
    copy = Replica.open(tmp_path)
    assert copy.lines()[0] == first + second
    copy.close()


# -- members -----------------------------------------------------------------------------------------------------------


class Member:
    """A member in this process: `kill` leaves nothing but its disk, and `cut` leaves it alone."""

    def __init__(self, name: str, folder: Path, group: Group) -> None:
        self.name, self.folder, self.group = name, folder / name, group
        self.identity = Identity.create()
        self.endpoint: Endpoint | None = None
        self.is_cut = False
        self.journal: GroupCommitJournal | None = None
        self.taken: TakenJournal | None = None
        self._task: asyncio.Task[None] | None = None
        self._service: ReplicaService | None = None

    async def start(self) -> None:
        endpoint = Endpoint(self.identity, RUN_ID, fast_config(stop_grace_s=0.01))
        members = Members(NAMES, NAMES.index(self.name), self._peer, self.group.name_of)
        self._service = ReplicaService(endpoint, Replica.open(self.folder), members, TAKEOVER_S)
        site = ReplicatedSite(endpoint, self._service, members, TAKEOVER_S)
        site.register()
        await endpoint.start()
        self.endpoint = endpoint
        self._task = asyncio.create_task(self._keep(site))

    async def kill(self, *, with_disk: bool = False) -> None:
        self.journal = self.taken = None
        endpoint, self.endpoint = self.endpoint, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if endpoint is not None:
            await endpoint.stop()
        if self._service is not None:
            await self._service.close()
        if with_disk:
            shutil.rmtree(self.folder)

    @property
    def copy(self) -> Replica:
        assert self._service is not None
        return self._service._replica

    def _peer(self, name: str) -> Peer | None:
        other = self.group.members[name]
        if other.endpoint is None:
            return None
        return Peer(other.endpoint.peer_id, "127.0.0.1:9") if self.is_cut or other.is_cut else other.endpoint.peer

    async def _keep(self, site: ReplicatedSite) -> None:
        while True:
            taken = await site.follow()
            journal = GroupCommitJournal(taken.target, taken.digest, taken.size_bytes, TAKEOVER_S, taken.confirmed_s)
            self.journal, self.taken = journal, taken
            try:
                await journal.run()
            except JournalLostError:
                self.journal = None
            finally:
                taken.target.abandon()


class Group:
    def __init__(self, folder: Path) -> None:
        self.members = {name: Member(name, folder, self) for name in NAMES}

    def name_of(self, key: str) -> str | None:
        return next((name for name, member in self.members.items() if member.identity.peer_id == key), None)

    def keepers(self) -> list[Member]:
        return [member for member in self.members.values() if member.journal is not None]

    async def keeper(self, *not_these: Member) -> Member:
        async with asyncio.timeout(40):
            while True:
                found = [each for each in self.keepers() if each not in not_these]
                if found:
                    return found[0]
                await asyncio.sleep(0.01)

    async def all_vote(self) -> None:
        async with asyncio.timeout(40):
            while not all(each.endpoint is not None and each.copy.state().is_voter for each in self.members.values()):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def group_in(folder: Path) -> AsyncIterator[Group]:
    group = Group(folder)
    for member in group.members.values():
        await member.start()
    try:
        yield group
    finally:
        for member in group.members.values():
            await member.kill()


async def add(member: Member, record: Record, within_s: float = 20.0) -> None:
    """Returns when it is acknowledged; raises TimeoutError or LedgerError if it is not known to be."""
    journal = member.journal
    if journal is None:
        raise LedgerError("it keeps the journal no more")
    journal.append(record)
    async with asyncio.timeout(within_s):
        await journal.committed(journal.position)


async def all_of(group: Group) -> list[Record]:
    """What the next keeper finds, when the one there is has been killed."""
    keeper = await group.keeper()
    await group.all_vote()
    await keeper.kill()
    heir = await group.keeper(keeper)
    assert heir.taken is not None
    return list(heir.taken.records)


@pytest.mark.slow
async def test_most_members_have_what_was_acknowledged_when_its_keeper_dies_with_its_disk(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        expected: list[Record] = []
        for turn in range(4):
            keeper = await group.keeper()
            assert keeper.taken is not None
            assert list(keeper.taken.records) == expected
            for number in range(5):
                await add(keeper, note(10 * turn + number))
                expected.append(note(10 * turn + number))
            if turn == 2:
                assert keeper.journal is not None
                keeper.journal.replace(note(1000))
                await add(keeper, note(1001))
                expected = [note(1000), note(1001)]
            await group.all_vote()
            await keeper.kill(with_disk=True)
            await keeper.start()
        assert await all_of(group) == expected


@pytest.mark.slow
async def test_a_minority_commits_nothing_and_the_former_keeper_is_refused(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        former = await group.keeper()
        await group.all_vote()
        await add(former, note(1))
        former.is_cut = True
        with pytest.raises((TimeoutError, LedgerError)):
            await add(former, note(666), within_s=1.0)
        heir = await group.keeper(former)
        await add(heir, note(2))
        former.is_cut = False
        async with asyncio.timeout(20):
            while former.journal is not None:
                await asyncio.sleep(0.01)
        await add(heir, note(3))
        async with asyncio.timeout(20):
            while former.copy.state().digest != heir.copy.state().digest:
                await asyncio.sleep(0.01)
        assert decode_lines(former.copy.lines()[0], "former")[0] == [note(1), note(2), note(3)]
        assert heir.taken is not None
        assert former.taken is not None
        assert heir.taken.token > former.taken.token


@pytest.mark.slow
async def test_one_member_alone_keeps_nothing_and_begins_nothing(tmp_path: Path) -> None:
    group = Group(tmp_path)
    first, second, third = group.members.values()
    await first.start()
    await second.start()
    try:
        await asyncio.sleep(4 * TAKEOVER_S)
        assert not group.keepers(), "at the very beginning all are needed"
        await third.start()
        keeper = await group.keeper()
        await add(keeper, note(1))
        await group.all_vote()
        others = [each for each in group.members.values() if each is not keeper]
        for other in others:
            await other.kill()
        with pytest.raises((TimeoutError, LedgerError)):
            await add(keeper, note(2), within_s=1.0)
        await others[0].start()
        heir = await group.keeper()
        await add(heir, note(3))
    finally:
        for member in group.members.values():
            await member.kill()


@pytest.mark.slow
async def test_a_member_that_lost_its_disk_counts_for_nothing_before_others_have_confirmed_the_keeper(tmp_path):
    """With one of the three away and one that forgot everything, what only two have is not acknowledged."""
    async with group_in(tmp_path) as group:
        keeper = await group.keeper()
        await add(keeper, note(1))
        await group.all_vote()
        forgetful, away = (each for each in group.members.values() if each is not keeper)
        await away.kill()
        await add(keeper, note(2))
        await forgetful.kill(with_disk=True)
        await forgetful.start()
        with pytest.raises((TimeoutError, LedgerError)):
            await add(keeper, note(3), within_s=3 * TAKEOVER_S)
        assert not forgetful.copy.state().is_voter
        await away.start()
        await group.all_vote()
        heir = await group.keeper()
        await add(heir, note(4))
        records = await all_of(group)
        assert records[:2] == [note(1), note(2)]
        assert records[-1] == note(4)


@pytest.mark.slow
async def test_strangers_neither_promise_nor_write(tmp_path: Path) -> None:
    async with group_in(tmp_path) as group:
        keeper = await group.keeper()
        stranger = Endpoint(Identity.create(), RUN_ID, fast_config())
        await stranger.start()
        assert keeper.endpoint is not None
        for method, ask, answer in (
            (PROMISE, PromiseAsk(ballot=10**9), PromiseAnswer),
            (WRITE, WriteAsk(ballot=10**9, index=0, digest=SEED), WriteAnswer),
        ):
            with pytest.raises(RefusedError, match=r"swarm.ledger.keepers"):
                await stranger.call(keeper.endpoint.peer, method, ask, answer, timeout_s=20.0)
        await stranger.stop()
        await add(keeper, note(1))


async def disturb(group: Group, draw: random.Random) -> None:
    """One thing at a time: so that at most one of three is away or without its vote."""
    await group.all_vote()
    victim = draw.choice(list(group.members.values()))
    match draw.choice(["cut", "kill", "lose", "keeper-cut", "keeper-lose"]):
        case "cut":
            victim.is_cut = True
            await asyncio.sleep(draw.uniform(0, 4 * TAKEOVER_S))
            victim.is_cut = False
        case "keeper-cut":
            keeper = await group.keeper()
            keeper.is_cut = True
            await asyncio.sleep(draw.uniform(0, 4 * TAKEOVER_S))
            keeper.is_cut = False
        case "kill":
            await victim.kill()
            await asyncio.sleep(draw.uniform(0, 3 * TAKEOVER_S))
            await victim.start()
        case "lose":
            await victim.kill(with_disk=True)
            await victim.start()
        case "keeper-lose":
            keeper = await group.keeper()
            await keeper.kill(with_disk=True)
            await keeper.start()


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow)] + [
    pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12)
])  # fmt: skip
def test_what_was_acknowledged_stays_in_order_whatever_happens_to_one_member_at_a_time(seed: int, tmp_path: Path):
    """Records are added through whoever keeps the journal; those whose fate is unknown may be there once, or not."""

    @on_event_loop
    async def test() -> None:
        draw = random.Random(seed)
        acknowledged: list[int] = []
        ending = asyncio.Event()

        async def adding(group: Group) -> None:
            number = 0
            while not ending.is_set():
                for keeper in group.keepers():
                    number += 1
                    with suppress(TimeoutError, LedgerError):
                        await add(keeper, note(number), within_s=0.5)
                        acknowledged.append(number)
                await asyncio.sleep(0.005)

        async with group_in(tmp_path) as group:
            task = asyncio.create_task(adding(group))
            for _ in range(6):
                await disturb(group, draw)
                before = len(acknowledged)
                await until(lambda before=before: len(acknowledged) >= before + 5)
            await group.all_vote()
            await asyncio.sleep(TAKEOVER_S)
            ending.set()
            await task
            found = [record.version for record in await all_of(group) if isinstance(record, Workers)]
            assert len(found) == len(set(found)), "nothing is there twice"
            places = {version: place for place, version in enumerate(found)}
            assert set(acknowledged) <= places.keys(), "what was acknowledged is there"
            assert [places[each] for each in acknowledged] == sorted(places[each] for each in acknowledged)

    test()
