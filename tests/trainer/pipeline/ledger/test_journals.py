"""The form of a journal, group commit, and the journal in a store: what a reader finds, whoever was killed where."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import StoreUnavailableError
from genesis.store.folder import FolderStore
from tests.support.event_loop import on_event_loop
from tests.support.fault_proxy import FAST_FAULTS, Fault, FaultProxy
from tests.support.ledger_cast import STAGES, WORKER, spec
from tests.support.s3_servers import moto_s3, point_boto3_at, rclone_s3, speaking_to
from trainer.errors import JournalLostError, LedgerError, TrainerUsageError
from trainer.pipeline.ledger import LedgerConfig
from trainer.pipeline.ledger.group_commit import GroupCommitJournal
from trainer.pipeline.ledger.journal_lines import SEED, check_lines, decode_lines, encode_line
from trainer.pipeline.ledger.ledger_state import LedgerState
from trainer.pipeline.ledger.records import (
    Granted,
    Opened,
    Record,
    Resolved,
    Settled,
    Workers,
    WorkerSeen,
)
from trainer.pipeline.ledger.store_journal import StoreSite
from trainer.pipeline.ledger.store_place import Head, StorePlace, read_journal
from trainer.pipeline.ledger.succession import TakenJournal
from trainer.pipeline.ledger.units import Run
from trainer.pipeline.protocol.work import Settlement, StageCredit, boottime_s

OPENED = Opened(spec=spec(), shards=(3,))


def note(version: int) -> Workers:
    return Workers(version=version)


# -- the form of a journal ---------------------------------------------------------------------------------------------

counts = st.integers(0, 2**53 - 1)
tokens = st.text("0123456789abcdef", min_size=32, max_size=32)
runs = st.builds(
    Run, epoch=st.integers(0, 9), shard=st.integers(0, 99), row=st.integers(0, 99), num_rows=st.integers(1, 99)
)
credited = st.builds(
    StageCredit,
    stage=st.sampled_from(STAGES),
    incarnation=st.sampled_from(list(WORKER.values())),
    applied_number=counts,
    shared_through=counts,
)
settlements = st.builds(
    Settlement,
    micro_batch=st.builds("e{}.s{}.r{}".format, st.integers(0, 9), st.integers(0, 99), st.integers(0, 99)),
    outcome=st.sampled_from(["done", "lost"]),
    credits=st.lists(credited, max_size=3).map(tuple),
    num_tokens=counts,
)
some_runs = st.lists(runs, max_size=3).map(tuple)
seen = st.builds(WorkerSeen, stage=st.sampled_from(STAGES), incarnation=st.sampled_from(list(WORKER.values())))
any_record: st.SearchStrategy[Record] = st.one_of(
    st.builds(Granted, token=tokens, driver=st.text(max_size=70), runs=some_runs),
    st.builds(Settled, token=tokens, settlements=st.lists(settlements, max_size=3).map(tuple), handed_back=some_runs),
    st.builds(Resolved, token=tokens, done=some_runs, returned=some_runs),
    st.builds(Workers, seen=st.lists(seen, max_size=2).map(tuple), version=st.none() | counts),
)


def encoded(records: list[Record]) -> tuple[bytes, list[int], str]:
    """All lines, where each ends, and the digest of the last."""
    lines, ends, digest = b"", list[int](), SEED
    for record in records:
        line, digest = encode_line(record, digest)
        lines += line
        ends.append(len(lines))
    return lines, ends, digest


@given(st.lists(any_record, max_size=8))
def test_what_was_encoded_is_decoded(records: list[Record]) -> None:
    lines, _, digest = encoded(records)
    assert decode_lines(lines, "here") == (records, digest, len(lines))
    assert check_lines(lines, SEED) == (digest, len(records), len(lines))


@given(st.lists(any_record, min_size=1, max_size=5), st.data())
def test_a_journal_that_is_cut_is_the_lines_before_and_only_where_it_may_be_cut(records, data):
    lines, ends, _ = encoded(records)
    cut = data.draw(st.integers(0, len(lines)))
    whole = [end for end in ends if end <= cut]
    found, _, size_bytes = decode_lines(lines[:cut], "here", may_be_cut=True)
    assert (found, size_bytes) == (records[: len(whole)], whole[-1] if whole else 0)
    if cut not in (0, *ends):
        with pytest.raises(LedgerError, match=f"line {len(whole) + 1} of here to fit"):
            decode_lines(lines[:cut], "here")


@given(st.lists(any_record, min_size=1, max_size=5), st.data())
def test_no_changed_byte_is_believed(records, data):
    lines, ends, _ = encoded(records)
    at = data.draw(st.integers(0, len(lines) - 1))
    changed = bytearray(lines)
    changed[at] ^= data.draw(st.integers(1, 255))
    before = sum(end <= at for end in ends)
    with suppress(LedgerError):
        assert decode_lines(bytes(changed), "here", may_be_cut=True)[0] == records[:before]
    with pytest.raises(LedgerError):
        decode_lines(bytes(changed), "here")


@given(st.binary(max_size=200))
def test_garbage_is_no_journal(garbage: bytes) -> None:
    with suppress(LedgerError):
        records, _, size_bytes = decode_lines(garbage, "here", may_be_cut=True)
        assert (records, size_bytes) == ([], 0)


# -- group commit ------------------------------------------------------------------------------------------------------


class SlowTarget:
    """Takes its time for each write, and keeps what was written together."""

    def __init__(self, write_s: float = 0.02) -> None:
        self.write_s = write_s
        self.groups: list[tuple[bytes, int]] = []
        self.confirmed = 0
        self.is_lost = self.is_closed = False
        self.answering = asyncio.Event()
        self.answering.set()

    async def append(self, lines: bytes, digest: str, num_records: int) -> None:
        await asyncio.sleep(self.write_s)
        await self.answering.wait()
        if self.is_lost:
            raise JournalLostError("another has it, with token 7")
        self.groups.append((lines, num_records))

    async def replace(self, lines: bytes, digest: str, num_records: int) -> None:
        self.groups.clear()
        await self.append(lines, digest, num_records)

    async def confirm(self) -> None:
        await self.append(b"", "", 0)
        self.groups.pop()
        self.confirmed += 1

    async def close(self) -> None:
        self.is_closed = True

    def abandon(self) -> None:
        return


@asynccontextmanager
async def group_commit(target: Any, takeover_s: float = 5.0) -> Any:
    journal = GroupCommitJournal(target, SEED, 0, takeover_s, boottime_s())
    running = asyncio.create_task(journal.run())
    try:
        yield journal
    finally:
        journal.close()
        await asyncio.gather(running, return_exceptions=True)


async def test_what_many_add_meanwhile_is_written_together_and_each_waits_for_its_part() -> None:
    target = SlowTarget()
    async with group_commit(target) as journal:

        async def add(version: int) -> int:
            journal.append(note(version))
            await journal.committed(journal.position)
            return sum(count for _, count in target.groups)

        durable = await asyncio.gather(*map(add, range(100)))
        assert all(count > version for version, count in enumerate(durable))
        assert len(target.groups) < 10
        journal.replace(note(1000))
        journal.append(note(1001))
        await journal.committed(journal.position)
    assert decode_lines(b"".join(lines for lines, _ in target.groups), "target")[0] == [note(1000), note(1001)]
    assert target.is_closed


async def test_a_keeper_that_lost_the_journal_tells_nobody_anything_more() -> None:
    target = SlowTarget()
    async with group_commit(target) as journal:
        journal.append(note(1))
        await journal.committed(journal.position)
        target.is_lost = True
        journal.append(note(2))
        with pytest.raises(LedgerError, match="token 7"):
            await journal.committed(journal.position)
        with pytest.raises(LedgerError, match="token 7"):
            journal.append(note(3))
        assert journal.is_lost


async def test_a_keeper_is_confirmed_while_nothing_is_written_and_answers_nothing_when_it_is_not() -> None:
    target = SlowTarget(write_s=0.0)
    async with group_commit(target, takeover_s=0.3) as journal:
        while target.confirmed < 3:
            await asyncio.sleep(0.01)
        journal.check_current()
        target.answering.clear()
        async with asyncio.timeout(20):
            with pytest.raises(LedgerError, match="another may keep the account by now"):
                while True:
                    journal.check_current()
                    await asyncio.sleep(0.02)
        target.answering.set()
        async with asyncio.timeout(20):
            while True:
                with suppress(LedgerError):
                    journal.check_current()
                    break
                await asyncio.sleep(0.02)


# -- in a store --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with moto_s3("genesis") as server, speaking_to(server):
        yield


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StorePlace:
    if request.param == "folder":
        return StorePlace.of(str(tmp_path / "store"), "run")
    request.getfixturevalue("s3")
    return StorePlace.of(f"s3://genesis/{tmp_path.name}", "run")


def site_in(place: StorePlace, driver: str, takeover_s: float = 0.2, **options: Any) -> StoreSite:
    found = {"may_keep": True, "is_away": lambda: True, **options}
    return StoreSite(place, driver * 64, takeover_s, **found)


async def appended(taken: TakenJournal, *records: Record) -> str:
    """Adds records to a journal that was taken, as one group; returns the digest."""
    digest = taken.digest
    lines = b""
    for record in records:
        line, digest = encode_line(record, digest)
        lines += line
    await taken.target.append(lines, digest, len(records))
    return digest


async def test_whoever_comes_next_finds_all_and_the_former_keepers_writes_fail_on_the_token(place: StorePlace) -> None:
    """The first never hears that it is replaced: nothing but its token keeps it from writing."""
    first = await site_in(place, "a").follow()
    digest = await appended(first, OPENED, note(1))
    second = await site_in(place, "b").follow()
    assert (first.token, second.token) == (1, 2)
    assert list(second.records) == [OPENED, note(1)]
    assert second.digest == digest
    line, after = encode_line(note(2), digest)
    for write in (
        lambda: first.target.append(line, after, 1),
        lambda: first.target.replace(*encode_line(note(9), SEED), 1),
        first.target.confirm,
        first.target.close,
    ):
        with pytest.raises(JournalLostError, match=rf"with token 1, found that .*driver {'b' * 12}.*token 2"):
            await write()
    await second.target.append(line, after, 1)
    assert decode_lines(read_journal(place)[0], "store")[0] == [OPENED, note(1), note(2)]


async def test_a_journal_that_is_kept_is_not_taken_and_one_that_was_given_back_is_at_once(place: StorePlace) -> None:
    first = await site_in(place, "a").follow()
    site = site_in(place, "b", takeover_s=4.0)
    waiting = asyncio.create_task(site.follow())
    for _ in range(22):
        await asyncio.sleep(0.2)
        await first.target.confirm()
        assert not waiting.done()
    assert site.keeper == "a" * 64
    await first.target.close()
    assert (await waiting).token == 2
    patient = site_in(place, "c", takeover_s=3600.0, may_keep=False)
    following = asyncio.create_task(patient.follow())
    async with asyncio.timeout(20):
        while patient.keeper != "b" * 64:
            await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_of_several_drivers_one_takes_over(place: StorePlace) -> None:
    sites = [site_in(place, key, takeover_s=5.0) for key in "abcdef"]
    following = [asyncio.create_task(site.follow()) for site in sites]
    await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.5)
    taken = [task for task in following if task.done()]
    assert len(taken) == 1
    assert taken[0].result().token == 1
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


async def test_lines_become_parts_and_a_snapshot_replaces_them(place: StorePlace, monkeypatch) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.store_journal.PART_BYTES", 300)
    taken = await site_in(place, "a").follow()
    records: list[Record] = [OPENED, *map(note, range(30))]
    digest = SEED
    for record in records:
        line, digest = encode_line(record, digest)
        await taken.target.append(line, digest, 1)
    lines, head = read_journal(place)
    assert head is not None
    assert len(head.about.parts) > 3
    assert decode_lines(lines, "store")[0] == records
    snapshot = LedgerState.of(records, spec(), ((2, 3, 5),)).snapshot()
    line, digest = encode_line(snapshot, SEED)
    await taken.target.replace(line, digest, 1)
    lines, head = read_journal(place)
    assert head is not None
    assert len(head.about.parts) == 1
    assert decode_lines(lines, "store") == ([snapshot], digest, len(lines))
    await taken.target.close()
    assert [found.key for found in place.store.list(place.prefix + "parts/")] == [head.about.parts[0].key]


class Recording:
    """A store that keeps every change that was made to it, in order."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.changes: list[tuple[str, str, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, body: bytes, **options: Any) -> str:
        etag: str = self._store.put(key, body, **options)
        self.changes.append(("put", key, bytes(body)))
        return etag

    def delete(self, key: str) -> None:
        self._store.delete(key)
        self.changes.append(("delete", key, b""))


def after(changes: list[tuple[str, str, bytes]], folder: Path) -> StorePlace:
    store = FolderStore(folder)
    for what, key, body in changes:
        if what == "put":
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(body)
        else:
            (folder / key).unlink(missing_ok=True)
    return StorePlace(store, "ledger/run/")


async def test_killed_behind_any_write_the_journal_is_what_was_acknowledged_or_one_group_more(tmp_path, monkeypatch):
    """Through parts, snapshots, deletions and three keepers, of which two left parts behind that no head names."""
    monkeypatch.setattr("trainer.pipeline.ledger.store_journal.PART_BYTES", 400)
    recording = Recording(FolderStore(tmp_path / "store"))
    place = StorePlace(recording, "ledger/run/")
    acknowledged: list[tuple[int, list[Record]]] = [(0, [])]
    written: list[Record] = []
    for keeper in "abc":
        taken = await site_in(place, keeper).follow()
        assert list(taken.records) == written
        digest = taken.digest
        for number in range(12):
            record: Record = note(len(recording.changes)) if written else OPENED
            if number == 8:
                record, digest = LedgerState.of(written, spec(), ((2, 3, 5),)).snapshot(), SEED
                line, digest = encode_line(record, digest)
                written = [record]
                await taken.target.replace(line, digest, 1)
            else:
                written = [*written, record]
                line, digest = encode_line(record, digest)
                await taken.target.append(line, digest, 1)
            acknowledged.append((len(recording.changes), written))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(place.put_part, taken.token, 99, b"killed before the head was written")
    for count in range(len(recording.changes) + 1):
        lines, _ = read_journal(after(recording.changes[:count], tmp_path / f"after-{count}"))
        found = decode_lines(lines, "store")[0]
        known = [records for at, records in acknowledged if at <= count][-1]
        later = [records for at, records in acknowledged if at > count][:1]
        assert found in (known, *later), count


def test_a_store_without_conditional_writes_is_refused_in_one_line(tmp_path: Path) -> None:
    with rclone_s3(tmp_path, "genesis") as server, speaking_to(server), pytest.raises(LedgerError) as refused:
        StorePlace.of("s3://genesis/run", "run").check()
    assert str(refused.value).startswith("swarm.ledger.journal: expected a store that honours If-Match")
    assert "\n" not in str(refused.value)
    for url in ("http://example.org/store", "ftp://example.org", ""):
        with pytest.raises(LedgerError, match=r"swarm.ledger.journal: expected"):
            StorePlace.of(url, "run")


@pytest.mark.parametrize("damage", ["head", "part", "cut"])
async def test_damage_is_refused_and_not_guessed_at(damage: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("trainer.pipeline.ledger.store_journal.PART_BYTES", 200)
    place = StorePlace.of(str(tmp_path), "a run:1")
    assert place.prefix.startswith("ledger/a_run_1-")
    taken = await site_in(place, "a").follow()
    digest = await appended(taken, OPENED, note(1))
    await taken.target.append(*encode_line(note(2), digest), 1)
    (part,) = (tmp_path / place.prefix / "parts").iterdir()
    head = tmp_path / place.head_key
    if damage == "head":
        head.write_bytes(b"{" + head.read_bytes())
    elif damage == "part":
        part.write_bytes(part.read_bytes().replace(b"7", b"8"))
    else:
        head.write_bytes(head.read_bytes()[:-5])
    with pytest.raises(LedgerError, match="expected"):
        await site_in(place, "b").follow()


async def test_a_write_whose_answer_was_lost_is_known_to_have_been_made(tmp_path, monkeypatch, caplog):
    """The store takes it, the line breaks; it is away for a while. Nothing is written twice, nobody loses the lease."""
    monkeypatch.setattr("trainer.pipeline.ledger.store_journal._RETRY_S", 0.01)
    store, failing = FolderStore(tmp_path), threading.Event()

    class Breaking(Recording):
        def put(self, key: str, body: bytes, **options: Any) -> str:
            if failing.is_set():
                raise StoreUnavailableError("expected an answer, found none")
            etag = super().put(key, body, **options)
            if len(self.changes) == 3:
                failing.set()
                raise StoreUnavailableError("expected an answer, found the connection broken")
            return etag

    place = StorePlace(Breaking(store), "ledger/run/")
    taken = await site_in(place, "a").follow()
    digest = await appended(taken, OPENED)
    writing = asyncio.create_task(taken.target.append(*encode_line(note(1), digest), 1))
    while "the journal cannot be written" not in caplog.text:  # However long the first write takes.
        await asyncio.sleep(0.01)
    assert failing.is_set() and not writing.done()
    failing.clear()
    await writing
    assert decode_lines(read_journal(place)[0], "store")[0] == [OPENED, note(1)]
    await taken.target.close()


@pytest.mark.slow
def test_a_bad_network_to_the_store_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @on_event_loop
    async def test() -> None:
        place = StorePlace.of("s3://genesis/bad", "run")
        taken = await site_in(place, "a", takeover_s=600.0).follow()
        records: list[Record] = [OPENED]
        digest = await appended(taken, OPENED)
        for version in range(40):
            line, digest = encode_line(note(version), digest)
            await taken.target.append(line, digest, 1)
            records.append(note(version))
        await taken.target.close()
        assert list((await site_in(place, "b").follow()).records) == records

    with moto_s3("genesis") as server, FaultProxy(server.port, seed=5, rate=0.25, faults=FAST_FAULTS) as proxy:
        point_boto3_at(server, proxy.port, monkeypatch)
        test()
        assert proxy.injected[Fault.LOST_ACK] > 0


async def test_heads_are_read_as_they_were_written(tmp_path: Path) -> None:
    place = StorePlace.of(str(tmp_path), "run")
    await site_in(place, "a").follow()
    head = place.read()
    assert head is not None
    assert Head.from_bytes(head.to_bytes(), head.etag, "here") == head
    tail = encode_line(note(1), SEED)[0] * 2
    longer = replace(head, tail=tail)
    assert Head.from_bytes(longer.to_bytes(), head.etag, "here").tail == tail
    for body in (b"", b"{}\n", b"x\n" + tail, head.to_bytes().rstrip(b"\n")):
        with pytest.raises(LedgerError, match="the head of a journal at here"):
            Head.from_bytes(body, "1", "here")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"journal": ""}, "journal: expected local, replicated"),
        ({"keepers": ("a",)}, "keepers: expected another journal than local"),
        ({"journal": "replicated"}, "keepers: expected three or five drivers"),
        ({"journal": "replicated", "keepers": ("a", "b")}, "keepers: expected three or five .* found 2"),
        ({"journal": "/x", "keepers": ("a", "a")}, "keepers: expected each driver once"),
        ({"takeover_s": 0.0}, "takeover_s: expected a positive number"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TrainerUsageError, match=f"swarm.ledger.{told}"):
        LedgerConfig(**options)
    assert not LedgerConfig().is_shared
    assert LedgerConfig(journal="/x").is_shared
