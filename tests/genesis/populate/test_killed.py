"""Killed, stopped, ousted, or with workers that die: the store ends as if nothing happened, and nothing runs on."""

import os
import random
import re
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from genesis.errors import CorruptInputError, LeaseHeldError, WorkerError
from genesis.populate.commit_log import CommitLog, read_checkpoints
from genesis.populate.crashpoint import CRASH_POINTS
from genesis.populate.lease import LeaseKeeper, held
from genesis.populate.options import LearnOptions, PopulateOptions
from genesis.populate.pipeline import populate
from genesis.populate.pool import WorkerPool
from genesis.sources import read_batches, resolve, tasks
from genesis.store import open_store
from genesis.tokenizer import NeuroTokenizer, choose_encoder
from manifests import SourceSpec
from tests.support.documents import documents, write_json_lines, write_parquet
from tests.support.populating import genesis, populate_arguments, run_and_kill, snapshot, start, stray_objects
from tests.support.waiting import wait_until

FIRST_RUN = ["vocabulary-stored:1", "tokenizer-published:1"]
ANY_RUN = ["lease-taken:1"] + [
    f"{point}:{count}"
    for point in ("shard-sealed", "shard-stored", "segment-stored", "checkpoint-stored", "manifest-published")
    for count in (1, 2, 3)
]


@pytest.mark.slow
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_between_any_two_writes(point, small_input, undisturbed, tmp_path):
    arguments = [*populate_arguments(tmp_path / "store", small_input), "--workers", "1"]
    count = 3 if point.startswith("shard") else 1
    assert run_and_kill(arguments, crash_at=f"{point}:{count}")
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == undisturbed
    assert stray_objects(tmp_path / "store") == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_thirty_times_in_one_populate(tmp_path):
    """Some 1,700 shards, so that there is always something left to be killed at."""
    path = write_parquet(tmp_path / "a.parquet", documents(seed=14, count=4000), 30)
    genesis(*populate_arguments(tmp_path / "peace", path, shard_tokens=500), "--workers", "2")
    schedule = random.Random(20261120)
    arguments = [*populate_arguments(tmp_path / "store", path, shard_tokens=500), "--workers", "2"]
    first_run = list(FIRST_RUN)
    kills = 0
    for attempt in range(60):
        if attempt % 5 == 4:
            kills += run_and_kill(arguments, after_s=schedule.uniform(0.3, 1.2))
        else:
            kills += run_and_kill(arguments, crash_at=first_run.pop(0) if first_run else schedule.choice(ANY_RUN))
        if kills >= 30:
            break
    assert kills >= 30
    genesis(*arguments)
    assert snapshot(tmp_path / "store") == snapshot(tmp_path / "peace")
    assert stray_objects(tmp_path / "store") == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_commit_in_hand(number, tmp_path):
    """On an input long enough to be still running; the exit code is the shell's for that signal."""
    path = write_json_lines(tmp_path / "long.jsonl", documents(seed=12, count=400) * 150)
    arguments = [*populate_arguments(tmp_path / "store", path, shard_tokens=50_000, merges=20), "--workers", "1"]
    process = start(*arguments)
    wait_until((tmp_path / "store" / "shard_1.pt").exists, "no shard")
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "the same command goes on from here" in output
    assert "Traceback" not in errors
    shards = len(snapshot(tmp_path / "store")["shards"])
    assert shards >= 1
    assert stray_objects(tmp_path / "store") == []
    genesis(*arguments, "--max-shards", str(shards + 1))
    assert len(snapshot(tmp_path / "store")["shards"]) == shards + 1


def options(store, *inputs):
    return PopulateOptions(
        spec=SourceSpec(name="s"), store_url=str(store), inputs=tuple(map(str, inputs)), num_workers=1,
        shard_tokens=1000, learn=LearnOptions(documents=50, merges=50),
    )  # fmt: skip


@pytest.mark.slow
def test_input_that_fails_commits_what_is_in_hand_and_nothing_later(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", documents(seed=20, count=500))
    path.write_bytes(path.read_bytes() + b"this is no JSON\n")
    url = tmp_path / "store"
    store = open_store(str(url))
    with pytest.raises(CorruptInputError, match="line 501"):
        populate(options(url, path), store)
    checkpoints, _ = read_checkpoints(store)
    shards = len(list(url.glob("shard_*.pt")))
    assert checkpoints.writer.expires_at is None
    assert checkpoints.manifest.total_shards == shards > 20
    time.sleep(0.5)
    assert read_checkpoints(store)[0] == checkpoints
    assert not [thread for thread in threading.enumerate() if thread.name in ("commit", "lease")]


def test_a_stop_is_heard_while_the_source_is_silent(tmp_path, monkeypatch):
    """The task iterator hangs, as one does that waits for a Hub that asks for patience."""
    path = write_json_lines(tmp_path / "a.jsonl", documents(seed=20, count=100))
    hang, waiting = threading.Event(), threading.Event()

    def silent(plan, cursor):
        waiting.set()
        hang.wait(60)
        yield from ()

    monkeypatch.setattr("genesis.populate.engine.tasks", silent)
    stop, results = threading.Event(), []
    store = open_store(str(tmp_path / "store"))
    run = threading.Thread(target=lambda: results.append(populate(options(tmp_path / "store", path), store, stop=stop)))
    run.start()
    assert waiting.wait(60)
    stop.set()
    run.join(20)
    hang.set()
    assert results[0].interrupted
    assert not results[0].ended
    assert read_checkpoints(store)[0].writer.expires_at is None


def long_arguments(store):
    """A populate that takes long enough to be met while it runs."""
    arguments = ["populate", "--source", "python-docs", "--store", str(store), "--shard-tokens", "20000"]
    return [*arguments, "--merges", "20", "--learn-documents", "20", "--workers", "1"]


@pytest.mark.slow
def test_a_store_that_is_removed_under_a_populator_is_named_as_such_and_not_made_again(tmp_path):
    store = tmp_path / "store"
    path = write_json_lines(tmp_path / "long.jsonl", documents(seed=12, count=400) * 150)
    arguments = [*populate_arguments(store, path, shard_tokens=50_000, merges=20), "--workers", "1"]
    process = start(*arguments)
    wait_until((store / "shard_1.pt").exists, "no shard")
    store.rename(tmp_path / "moved")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1, output
    # Found in the midst of a write, or between two by what its own last commit left there.
    ends = (
        "the store's folder was removed or moved while it was written to",
        "checkpoints.json is gone: the store was",
    )
    assert any(f"genesis: {store}: {end}" in errors for end in ends), errors
    assert "taken over" not in errors
    assert "doctor" not in errors
    assert "Traceback" not in errors
    assert not store.exists()
    (tmp_path / "moved").rename(store)
    shards = len(snapshot(store)["shards"])
    genesis(*arguments, "--max-shards", str(shards + 1))
    assert len(snapshot(store)["shards"]) == shards + 1


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


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = NeuroTokenizer.empty()
    tokenizer.learn_merges(documents(seed=5, count=50), 50, source="s")
    return tokenizer


@pytest.fixture
def plan(tmp_path):
    write_parquet(tmp_path / "a.parquet", documents(seed=6, count=600), 20)
    return resolve(SourceSpec(name="s"), [str(tmp_path)])


@contextmanager
def pool_of(tokenizer, workers):
    with WorkerPool(workers) as pool:
        pool.load(choose_encoder(tokenizer.to_file()))
        yield pool


def expected(tokenizer, plan):
    texts = [text for task in tasks(plan, None) for batch in read_batches(task) for text in batch.texts]
    return np.concatenate([np.append(tokenizer.encode(text), np.uint32(2)) for text in texts])


def ids_of(blocks):
    return np.concatenate([block.ids.copy() for block in blocks])


@pytest.mark.slow
def test_a_worker_killed_while_it_starts_is_replaced(tokenizer, plan):
    with pool_of(tokenizer, 1) as pool:
        os.kill(pool.process_ids[0], signal.SIGKILL)
        found = ids_of(pool.blocks(tasks(plan, None)))
    assert (found == expected(tokenizer, plan)).all()


def test_a_task_that_kills_every_worker_stops_the_run(tokenizer, plan):
    stop = threading.Event()

    def kill_all(pool):
        while not stop.is_set():
            for process_id in pool.process_ids:
                try:
                    os.kill(process_id, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)

    with pool_of(tokenizer, 1) as pool:
        killer = threading.Thread(target=kill_all, args=(pool,))
        killer.start()
        try:
            with pytest.raises(WorkerError, match=r"signal 9.*row group 0 of a\.parquet"):
                ids_of(pool.blocks(tasks(plan, None)))
        finally:
            stop.set()
            killer.join()


@pytest.mark.slow
def test_workers_end_with_their_pool(tokenizer, plan):
    with pool_of(tokenizer, 2) as pool:
        next(iter(pool.blocks(tasks(plan, None))))
        process_ids = pool.process_ids
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


@pytest.mark.slow
def test_text_larger_than_the_ring_arrives(tokenizer, tmp_path):
    """Twenty million bytes in one document: more ids than half the ring holds."""
    text = "x \n" * 6_700_000
    write_parquet(tmp_path / "big.parquet", ["small", text, "after"], 10)
    big = resolve(SourceSpec(name="s"), [str(tmp_path / "big.parquet")])
    with pool_of(NeuroTokenizer.empty(), 1) as pool:
        found = ids_of(pool.blocks(tasks(big, None)))
    assert len(found) == len("small") + len(text) + len("after") + 3
    assert bytes((found[6:-7] - 10).astype(np.uint8)) == text.encode()


def test_a_dead_workers_tasks_keep_their_order(tokenizer, plan):
    """Its replacement does them, so that every ring holds results in the order in which they are wanted."""
    with pool_of(tokenizer, 3) as pool:
        blocks = pool.blocks(tasks(plan, None))
        found = [next(blocks).ids.copy()]
        for victim in (1, 0, 2):
            os.kill(pool.process_ids[victim], signal.SIGKILL)
            found.append(next(blocks).ids.copy())
            assert all(held == sorted(held) for held in pool.assignments)
        found += [block.ids.copy() for block in blocks]
    assert (np.concatenate(found) == expected(tokenizer, plan)).all()
