"""A worker that dies is replaced and its work done again; one that cannot do its task stops the run with its reason."""

import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from genesis.errors import CorruptInputError, WorkerError
from genesis.populate.pool import WorkerPool
from genesis.sources import resolve, tasks
from genesis.tokenizer import NeuroTokenizer, hf_tokenizer_json
from manifests import SourceSpec
from tests.support.documents import documents, write_parquet


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
        pool.load(hf_tokenizer_json(tokenizer.to_file()))
        yield pool


def expected(tokenizer, plan):
    from genesis.sources import read_batches

    texts = [text for task in tasks(plan, None) for batch in read_batches(task) for text in batch.texts]
    return np.concatenate([np.append(tokenizer.encode(text), np.uint32(2)) for text in texts])


def ids_of(blocks):
    return np.concatenate([block.ids.copy() for block in blocks])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_blocks_come_in_order(tokenizer, plan, workers):
    with pool_of(tokenizer, workers) as pool:
        found = ids_of(pool.blocks(tasks(plan, None)))
    assert (found == expected(tokenizer, plan)).all()


@pytest.mark.slow
def test_killed_workers_are_replaced(tokenizer, plan):
    found = []
    with pool_of(tokenizer, 2) as pool:
        for number, block in enumerate(pool.blocks(tasks(plan, None))):
            found.append(block.ids.copy())
            if number in (0, 7, 15):
                os.kill(pool.process_ids[number % 2], signal.SIGKILL)
    assert (np.concatenate(found) == expected(tokenizer, plan)).all()
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
def test_a_damaged_row_group_is_raised_after_all_before_it(tokenizer, plan):
    path = Path(plan.files[0].location)
    whole = expected(tokenizer, plan)
    body = bytearray(path.read_bytes())
    body[len(body) // 2 : len(body) // 2 + 2000] = random.Random(1).randbytes(2000)
    path.write_bytes(body)
    found = []
    with pool_of(tokenizer, 2) as pool, pytest.raises(CorruptInputError, match=r"a\.parquet"):
        found.extend(block.ids.copy() for block in pool.blocks(tasks(plan, None)))
    before = np.concatenate(found)
    assert 0.2 * len(whole) < len(before) < 0.8 * len(whole)
    assert (before == whole[: len(before)]).all()


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
