"""Killed, stopped, or beside a growing store: an export ends with the bytes of one that nothing disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from genesis.errors import InputChangedError, StoreError, UsageError
from genesis.export import ExportFormat, ExportOptions, export_shards
from genesis.file_lock import FileLock
from genesis.populate.crashpoint import EXPORT_CRASH_POINTS
from genesis.store import FolderStore
from manifests import ContractError
from tests.support.exporting import bytes_of, document_store, random_documents, read_export, same, whole_documents
from tests.support.populating import genesis, start

TARGETS = [each.value for each in ExportFormat]
DOCUMENTS = {"alpha": random_documents(11, 150), "beta": random_documents(12, 90)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return document_store(tmp_path_factory.mktemp("stored"), DOCUMENTS)


@pytest.fixture
def often(monkeypatch):
    """A checkpoint after each shard, or after each small MDS file."""
    monkeypatch.setattr("genesis.export.writing._CHECKPOINT_BYTES", 1)


def options_of(target, **options):
    if target == "mds":
        options = {"size_limit_bytes": 2_000, **options}
    return ExportOptions(target=ExportFormat(target), **options)


class _StopAfter:
    """Asks for a stop once so many shards were written in this run."""

    def __init__(self, shards: int) -> None:
        self.event = threading.Event()
        self._left = shards

    def progress(self, done: int, total: int) -> None:
        self._left -= 1
        if self._left == 0:
            self.event.set()


@pytest.mark.parametrize("seq_len", [None, 50])
@pytest.mark.parametrize("target", TARGETS)
def test_stopped_after_every_shard(stored, target, seq_len, often, tmp_path):
    if seq_len is not None and target != "mds":
        pytest.skip("only MDS has windows")
    store, options = FolderStore(stored.folder), options_of(target, seq_len=seq_len)
    whole = export_shards(store, tmp_path / "whole", options)
    runs = 0
    while True:
        # An MDS run goes on from the file it was making: it must read on to make it whole.
        stop = _StopAfter(1 if target != "mds" else 12)
        result = export_shards(store, tmp_path / "out", options, stop=stop.event, on_progress=stop.progress)
        runs += 1
        assert runs < 200, "no progress"
        if not result.interrupted:
            break
        assert not result.complete
    assert runs > (3 if target != "mds" else 1)
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    for fact in ("documents", "tokens", "cut_tokens", "shards"):
        assert getattr(result, fact) == getattr(whole, fact)


@pytest.mark.parametrize("target", TARGETS)
def test_a_range_that_begins_and_ends_inside_documents_is_resumed(target, often, tmp_path):
    documents = {"alpha": random_documents(31, 150), "beta": random_documents(32, 150)}
    stored = document_store(tmp_path / "store", documents, shard_tokens=100)
    store, options = FolderStore(stored.folder), options_of(target, first_shard=10, end_shard=130)
    whole = export_shards(store, tmp_path / "whole", options)
    assert whole.skipped_tokens
    for _ in range(200):
        stop = _StopAfter(1 if target != "mds" else 60)
        result = export_shards(store, tmp_path / "out", options, stop=stop.event, on_progress=stop.progress)
        if not result.interrupted:
            break
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert (result.skipped_tokens, result.cut_tokens) == (whole.skipped_tokens, whole.cut_tokens)


def arguments_of(stored, folder, target):
    small = ["--size-limit", "2000"] if target == "mds" else []
    return ["export", "shards", "--to", target, "--store", stored.url, *small, str(folder)]


def _points(target):
    """Those that a small export passes: only MDS, with its many files, has checkpoints on the way."""
    on_the_way = ("export-synced", "export-checkpointed")
    return [point for point in EXPORT_CRASH_POINTS if target == "mds" or point not in on_the_way]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_killed_between_any_two_writes(stored, target, tmp_path):
    genesis(*arguments_of(stored, tmp_path / "whole", target))
    expected = bytes_of(tmp_path / "whole")
    for point in _points(target):
        process = start(*arguments_of(stored, tmp_path / point, target), GENESIS_CRASH_AT=point)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, point
        genesis(*arguments_of(stored, tmp_path / point, target))
        assert bytes_of(tmp_path / point) == expected, point


_KILLED = """
import os, signal, sys
from pathlib import Path
from genesis.export import ExportFormat, ExportOptions, export_shards, writing
from genesis.store import FolderStore

writing._CHECKPOINT_BYTES = 1
store, folder, target, die_at = sys.argv[1:]
size = {"size_limit_bytes": 2000} if target == "mds" else {}
calls = [0]
def dying(real):
    def call(*arguments, **named):
        calls[0] += 1
        if calls[0] == int(die_at):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call
for name in ("write", "fsync", "ftruncate", "replace", "rename"):
    setattr(os, name, dying(getattr(os, name)))
export_shards(FolderStore(store), Path(folder), ExportOptions(target=ExportFormat(target), **size))
print(calls[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_killed_at_system_calls_on_a_seeded_schedule(target, tmp_path):
    """SIGKILL before a write, fsync, truncation or rename; ten times in one export, then once more to its end."""
    documents = {"alpha": random_documents(21, 30), "beta": random_documents(22, 20)}
    stored = document_store(tmp_path / "store", documents)

    def run(folder, die_at):
        command = [sys.executable, "-c", _KILLED, stored.url, str(folder), target, str(die_at)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)

    whole = run(tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    schedule = random.Random(20261123)
    kills = 0
    for _ in range(10):
        killed = run(tmp_path / "out", schedule.randint(1, max(int(whole.stdout) // 4, 2)))
        kills += killed.returncode == -signal.SIGKILL
        assert killed.returncode in (0, -signal.SIGKILL), killed.stderr
    assert kills >= 3
    last = run(tmp_path / "out", 0)
    assert last.returncode == 0, last.stderr
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert same(read_export(target, tmp_path / "out"), whole_documents(stored, documents))


@pytest.mark.parametrize("target", TARGETS)
def test_shards_that_came_later_are_not_part_of_an_export_that_was_begun(target, often, tmp_path):
    stored = document_store(tmp_path / "store", DOCUMENTS)
    store, options = FolderStore(stored.folder), options_of(target)
    export_shards(store, tmp_path / "whole", options)
    stop = _StopAfter(4)
    export_shards(store, tmp_path / "out", options, stop=stop.event, on_progress=stop.progress)
    stored.grow(3, sources=("alpha", "gamma"))
    assert export_shards(store, tmp_path / "out", options).complete
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def test_another_store_is_refused(stored, often, tmp_path):
    other = document_store(tmp_path / "other", {"alpha": random_documents(13, 150), "beta": random_documents(14, 90)})
    stop = _StopAfter(4)
    export_shards(
        FolderStore(stored.folder), tmp_path / "out", options_of("npy"), stop=stop.event, on_progress=stop.progress
    )
    with pytest.raises(InputChangedError, match="export of other shards"):
        export_shards(FolderStore(other.folder), tmp_path / "out", options_of("npy"))


def test_other_options_are_refused(stored, tmp_path):
    export_shards(FolderStore(stored.folder), tmp_path, options_of("npy"))
    with pytest.raises(ContractError, match="holds an export with source None, asked for alpha"):
        export_shards(FolderStore(stored.folder), tmp_path, options_of("npy", source="alpha"))


def test_the_same_command_again_does_nothing(stored, tmp_path):
    store = FolderStore(stored.folder)
    first = export_shards(store, tmp_path, options_of("megatron"))
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = export_shards(store, tmp_path, options_of("megatron"))
    assert again.was_complete
    assert (again.documents, again.files) == (first.documents, ("tokens.bin", "tokens.idx"))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_a_file_that_was_cut_meanwhile_is_told(stored, often, tmp_path):
    stop = _StopAfter(4)
    store = FolderStore(stored.folder)
    export_shards(store, tmp_path, options_of("datatrove"), stop=stop.event, on_progress=stop.progress)
    os.truncate(tmp_path / "tokens.ds.part", 10)
    with pytest.raises(StoreError, match=r"tokens\.ds\.part: expected at least"):
        export_shards(store, tmp_path, options_of("datatrove"))


def test_two_exports_into_one_folder(stored, tmp_path):
    with FileLock(tmp_path / ".genesis-export.lock"), pytest.raises(UsageError, match="another export is writing"):
        export_shards(FolderStore(stored.folder), tmp_path, options_of("npy"))


@pytest.mark.slow
def test_a_signal_stops_after_a_checkpoint(tmp_path):
    documents = {"alpha": random_documents(41, 3000, mean=300)}
    stored = document_store(tmp_path / "store", documents, shard_tokens=400)
    process = start(*arguments_of(stored, tmp_path / "out", "npy"))
    while not (tmp_path / "out" / "tokens.npy.part").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode in (0, 128 + signal.SIGTERM)
    if process.returncode:
        assert "the same command goes on from here" in output
    genesis(*arguments_of(stored, tmp_path / "out", "npy"))
    assert same(read_export("npy", tmp_path / "out"), whole_documents(stored, documents))


@pytest.mark.parametrize("name", ["tokens.bin.part", "tokens.idx.part", "tokens.ends.part"])
def test_a_file_or_link_with_the_name_of_an_unfinished_one_is_left_alone(name, stored, tmp_path):
    (tmp_path / "out").mkdir()
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "out" / name).symlink_to(precious)
    with pytest.raises(UsageError, match="is there already"):
        export_shards(FolderStore(stored.folder), tmp_path / "out", options_of("megatron"))
    assert precious.read_bytes() == b"precious"
