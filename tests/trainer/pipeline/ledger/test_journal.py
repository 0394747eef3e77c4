"""The account's file: what was acknowledged is in it, whatever happens to the process or the last line."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.ledger_cast import SHARDS, done, journal_path, lost, micro_batches, spec
from trainer.errors import LedgerError
from trainer.pipeline.ledger import LedgerConfig, open_ledger
from trainer.pipeline.ledger.journal import _SEED, Journal, _digest
from trainer.pipeline.ledger.ledger import Ledger

CONFIG = LedgerConfig(unit_rows=8, reissue_after_s=0)
A, B = "a" * 32, "b" * 32


@contextmanager
def opened(path: Path, config: LedgerConfig = CONFIG) -> Iterator[tuple[Ledger, Journal]]:
    ledger, journal = open_ledger(path, spec(), (SHARDS,), config)
    try:
        yield ledger, journal
    finally:
        journal.close()


@pytest.mark.slow
def test_a_journal_cut_at_any_byte_of_its_last_line_or_with_others_there_is_the_account_before_it(
    tmp_path: Path,
) -> None:
    path = journal_path(tmp_path)
    with opened(path) as (ledger, _):
        given = micro_batches(ledger.lease("one", A, (), 2, 0.0).runs)
        before, whole_bytes = ledger.account(), path.stat().st_size
        ledger.settle("one", A, [lost(given[0])])
        after = ledger.account()
    body = path.read_bytes()
    assert len(body) > whole_bytes
    for length in range(whole_bytes, len(body) + 1):
        cut = journal_path(tmp_path / "cut")
        cut.parent.mkdir(parents=True, exist_ok=True)
        cut.write_bytes(body[:length])
        with opened(cut) as (ledger, _):
            assert ledger.account() == (after if length == len(body) else before), length
            if length % 40 and length < len(body):
                continue
            ledger.settle("one", A, [lost(given[1])])
        with opened(cut) as (ledger, _):
            assert ledger.account().micro_batches.lost == (2 if length == len(body) else 1)
    last = body[whole_bytes:]
    for garbage in (b"\0" * len(last), b"\xff\xfe\n", last.replace(b'"lost"', b'"done"')):
        path.write_bytes(body[:whole_bytes] + garbage)
        with opened(path) as (ledger, _):
            assert ledger.account() == before


@pytest.mark.parametrize("change", ["flip", "drop", "swap", "repeat"])
def test_damage_before_the_last_line_is_refused(tmp_path: Path, change: str) -> None:
    path = journal_path(tmp_path)
    with opened(path) as (ledger, _):
        given = micro_batches(ledger.lease("one", A, (), 2, 0.0).runs)
        for each in given:
            ledger.settle("one", A, [done(each)])
    first, second, third, fourth, *rest = path.read_bytes().splitlines(keepends=True)
    changed = {
        "flip": [third.replace(b'"done"', b'"lost"'), fourth],
        "drop": [fourth],
        "swap": [fourth, third],
        "repeat": [third, third, fourth],
    }
    lines = [first, second, *changed[change], *rest]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=r"line \d of .* damaged or changed"), opened(path):
        pass
    assert path.read_bytes() == b"".join(lines)


def test_one_process_keeps_a_journal_of_this_release_in_a_folder_that_can_be_written(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    with opened(path), pytest.raises(LedgerError, match="another process"):
        Journal.open(path)
    with opened(path):
        pass
    with pytest.raises(LedgerError, match="expected a journal that can be written at"):
        Journal.open(path / "journal.jsonl")
    body = b'{"kind":"opened","version":2}'
    path.write_bytes(b"%s %s\n" % (_digest(_SEED, body).encode(), body))
    with pytest.raises(LedgerError, match=r"line 1 of .* another"):
        Journal.open(path)


def test_it_is_compacted_to_what_it_adds_up_to(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    config = LedgerConfig(unit_rows=8, compact_bytes=1 << 12, max_open=10**6)
    sizes = []
    with opened(path, config) as (ledger, journal):
        ledger.lease("two", B, (), 1, 0.0)
        for n in range(60):
            token = f"{n:032x}"
            given = micro_batches(ledger.lease("one", token, (), 2, 0.0).runs)
            ledger.settle("one", token, [done(each, n + 1) for each in given], given[3:])
            sizes.append(path.stat().st_size)
            assert sizes[-1] == journal.size_bytes
        account = ledger.account()
    assert any(after < before for before, after in pairwise(sizes))
    assert max(sizes) < 12_000
    with opened(path, config) as (ledger, _):
        assert ledger.account() == account
        assert ledger.settle("two", B, [done(each) for each in micro_batches(ledger.lease("two", B, (), 1, 0.0).runs)])


def test_a_compaction_that_was_killed_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    with opened(path) as (ledger, journal):
        ledger.lease("one", A, (), 2, 0.0)
        account = ledger.account()
        copy = tmp_path / "copy"
        shutil.copytree(path.parent, copy)
        journal.replace(ledger.state.snapshot())
        snapshot = path.read_bytes()
    for length in range(0, len(snapshot), 61):  # Killed before the renaming.
        (copy / (path.name + ".new")).write_bytes(snapshot[:length])
        with opened(copy / path.name) as (ledger, _):
            assert ledger.account() == account
    with opened(path) as (ledger, _):
        assert ledger.account() == account


def test_a_line_that_cannot_be_written_ends_it_and_costs_nothing(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(path) as (ledger, journal):
        given = micro_batches(ledger.lease("one", A, (), 2, 0.0).runs)
        before = ledger.account()
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(LedgerError, match="expected to write the journal"):
                ledger.settle("one", A, [done(given[0])])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.stat().st_size == journal.size_bytes + 20  # A part of it is there.
        with pytest.raises(LedgerError, match="writing has failed"):
            ledger.lease("two", B, (), 1, 0.0)
        assert ledger.account() == before
    with opened(path) as (ledger, _):
        assert ledger.account() == before
        assert ledger.settle("one", A, [done(given[0])]).accepted == 1


def test_it_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with opened(journal_path(tmp_path)) as (ledger, journal):
        journal.replace(ledger.state.snapshot())
        with pytest.raises(LedgerError):
            Journal.open(journal_path(tmp_path))
    (tmp_path / "damaged").write_bytes(b"x\nx\n")
    with pytest.raises(LedgerError):
        Journal.open(tmp_path / "damaged")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
