"""Two populators, one store: one writes, the other is told; and whoever lost the lease does no harm."""

import re
import signal
import threading
import time

import pytest

from genesis.errors import LeaseHeldError
from genesis.populate.commit_log import CommitLog, read_checkpoints
from genesis.populate.keeper import LeaseKeeper, held
from genesis.store import CachePolicy, open_store
from manifests import Writer
from tests.support.populating import genesis, populate_arguments, snapshot, start, stray_objects


def long_arguments(store):
    """A populate that takes long enough to be met while it runs."""
    arguments = ["populate", "--source", "python-docs", "--store", str(store), "--shard-tokens", "20000"]
    return [*arguments, "--merges", "20", "--learn-documents", "20", "--workers", "1"]


def wait_until(condition, what, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.slow
def test_the_second_refuses_and_names_the_first(tmp_path, small_input):
    store = tmp_path / "store"
    first = start(*long_arguments(store))
    try:
        wait_until((store / "shard_0.pt").exists, "no shard")
        first.send_signal(signal.SIGSTOP)
        refused = genesis(*populate_arguments(store, small_input, shard_tokens=20000), expect=1)
        assert re.search(rf"being written by process {first.pid} on \S+ \(populating python-docs\)", refused.stderr)
        first.send_signal(signal.SIGCONT)
        first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 0


@pytest.mark.slow
def test_a_stale_lease_is_taken_over_and_the_ousted_stops_without_harm(tmp_path, small_input):
    store = tmp_path / "store"
    ousted = start(*long_arguments(store), "--lease-s", "2")
    try:
        wait_until((store / "shard_0.pt").exists, "no shard")
        ousted.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        done = genesis(*populate_arguments(store, small_input, shard_tokens=20000), "--workers", "1")
        assert "taking over the stale lease of process" in done.stderr
        before = snapshot(store)
        ousted.send_signal(signal.SIGCONT)
        _, errors = ousted.communicate(timeout=60)
    finally:
        ousted.kill()
    assert ousted.returncode == 1
    assert "was taken over by" in errors
    assert "Traceback" not in errors
    assert snapshot(store) == before
    # What it had stored and could not commit lies beyond the manifest, where the next shards replace it.
    total = before["manifest"]["total_shards"]
    assert all(int(re.search(r"shard_(\d+)", key)[1]) >= total for key in stray_objects(store))
    genesis(*long_arguments(store))
    assert stray_objects(store) == []


@pytest.mark.slow
def test_a_lease_is_kept_while_nothing_is_committed(tmp_path):
    store = open_store(str(tmp_path / "store"))
    commit_log = CommitLog(store, 100, lease_s=1.5)
    with held(commit_log), LeaseKeeper(commit_log, on_lost=lambda: None) as keeper:
        first = read_checkpoints(store)[0].writer
        time.sleep(3.5)
        with pytest.raises(LeaseHeldError):
            CommitLog(store, 100).open()
        later = read_checkpoints(store)[0].writer
    assert later.id == first.id
    assert later.expires_at > first.expires_at
    assert keeper.failure is None
    CommitLog(store, 100).open()


def test_a_keeper_says_when_the_lease_is_lost(tmp_path):
    store = open_store(str(tmp_path / "store"))
    commit_log, lost = CommitLog(store, 100, lease_s=0.9), threading.Event()
    commit_log.open()
    with LeaseKeeper(commit_log, on_lost=lost.set) as keeper:
        checkpoints, etag = read_checkpoints(store)
        usurped = checkpoints.model_copy(update={"writer": Writer(id="gpu-9:1:1:", token=99)})
        store.put("checkpoints.json", usurped.to_json(), cache=CachePolicy.NONE, if_match=etag)
        assert lost.wait(30)
    assert "taken over by process 1 on gpu-9" in str(keeper.failure)
