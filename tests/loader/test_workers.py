"""torch's DataLoader with any number of workers gives the batches of direct iteration; and what its processes share."""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
import multiprocessing.context
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from loader import CorruptObjectError, GenesisDataset, LoaderError, LoaderUsageError, PlateauRule
from loader.shared_stream import WorkerBoard
from tests.support.token_store import TokenStore, digest, take

# Four workers on two cores are what is tested; the other is between torchdata 0.11 and torch 2.13.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning", "ignore:'set_vital' is deprecated:UserWarning"
)

Make = Callable[..., GenesisDataset]
FINITE: dict[str, Any] = {"epochs": 1, "batch_size": 7, "seq_len": 333, "count": 2}
"""Ten windows a pass, each worker's share of another length."""
QUICK = PlateauRule("absolute", history=4, window=3, min_steps=2)


def workers(dataset: GenesisDataset, count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, num_workers=count, timeout=60 if count else 0, **options)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_sequence_of_direct_iteration(six_shards: TokenStore, make_dataset: Make, count: int) -> None:
    expected = take(make_dataset(six_shards), 40)
    assert take(workers(make_dataset(six_shards), count), 40) == expected


@pytest.mark.slow
def test_spawned_workers(six_shards: TokenStore, make_dataset: Make) -> None:
    expected = take(make_dataset(six_shards, **FINITE))
    dataset = make_dataset(six_shards, **FINITE)
    assert take(workers(dataset, 2, multiprocessing_context="spawn")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_pass_after_pass(six_shards: TokenStore, make_dataset: Make, count: int, persistent: bool) -> None:
    for batch_size in (7, 2):
        options = {**FINITE, "batch_size": batch_size}
        direct = make_dataset(six_shards, **options)
        expected = [take(direct) for _ in range(3)]
        dataset = make_dataset(six_shards, **options)
        loader = workers(dataset, count, persistent_workers=persistent)
        torch.manual_seed(0)
        found = []
        for _ in range(3):
            torch.manual_seed(0)  # As scripts do that want each epoch to be reproducible.
            found.append(take(loader))
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_rotations_are_those_of_one_process(six_shards: TokenStore, make_dataset: Make, count: int) -> None:
    options = {"plateau": QUICK, "seq_len": 32}
    dataset = make_dataset(six_shards, **options)
    found = []
    for step, batch in enumerate(itertools.islice(workers(dataset, count), 90)):
        found.append(digest(batch))
        dataset.report_loss(0.01 if step % 20 > 9 else 2.0)
    rotations = dataset.rotations
    assert len(rotations) >= 3
    # One process that leaves its shards before the same batches.
    reference = make_dataset(six_shards, **options)
    state = reference.state_dict()
    reference.load_state_dict({**state, "rotations": list(rotations)})
    assert take(reference, 90) == found
    assert reference.rotations == rotations
    for step in (0, 45, 89):
        assert digest(dataset.replay("node-a", step, rotations=rotations)) == found[step]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 3), (3, 2)])
def test_a_state_of_a_step_resumes_with_another_number_of_workers(six_shards, make_dataset, before, after):
    options = {"plateau": QUICK, "seq_len": 32}
    dataset = make_dataset(six_shards, **options)
    found = []
    for step, batch in zip(range(37), workers(dataset, before), strict=False):
        found.append(digest(batch))
        dataset.report_loss(0.01 if step % 20 > 9 else 2.0)
    if before:
        with pytest.raises(LoaderUsageError, match=r"state_dict\(step=N\)"):
            dataset.state_dict()
    state = json.loads(json.dumps(dataset.state_dict(step=37)))
    assert state["step"] == 37
    expected = [digest(dataset.replay("node-a", step, rotations=dataset.rotations)) for step in range(60)]
    assert found == expected[:37]
    resumed = make_dataset(six_shards, **options, state=state)
    assert take(workers(resumed, after), 23) == expected[37:]


@pytest.mark.slow
def test_a_pass_that_is_broken_off_begins_again(six_shards: TokenStore, make_dataset: Make) -> None:
    """Only the training loop knows how far it came; a state of that step says so."""
    expected = take(make_dataset(six_shards), 30)
    dataset = make_dataset(six_shards, plateau="off")
    loader = workers(dataset, 2)
    for batch, wanted in zip(loader, expected[:5], strict=False):
        assert digest(batch) == wanted
        dataset.report_loss(2.0)
    assert take(loader, 10) == expected[:10]
    dataset.load_state_dict(dataset.state_dict(step=10))
    assert take(loader, 10) == expected[10:20]


def test_a_copy_does_not_move_this_stream(six_shards: TokenStore, make_dataset: Make) -> None:
    expected = take(make_dataset(six_shards), 210)
    dataset = make_dataset(six_shards)
    iterator = iter(dataset)
    found = take(iterator, 5)
    for other in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        other.load_state_dict(other.state_dict(step=200))
        assert take(workers(other, 2), 3) == expected[200:203]
        dataset.report_loss(2.0)
        assert dataset.state_dict()["step"] == 5
    assert found + take(iterator, 5) == expected[:10]


def train_a_rank(dataset: GenesisDataset, step: int, found: Any) -> None:
    """As a script of several processes does that makes its dataset before it starts them."""
    dataset.load_state_dict(dataset.state_dict(step=step))
    loader = workers(dataset, 2)
    batches = []
    for batch in itertools.islice(loader, 6):
        batches.append(digest(batch))
        dataset.report_loss(2.0)
    dataset.load_state_dict(dataset.state_dict(step=step + 6))
    found.put((step, batches + take(loader, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_are_no_workers_have_streams_of_their_own(six_shards, make_dataset, method):
    expected = take(make_dataset(six_shards), 100)
    dataset = make_dataset(six_shards)
    context = multiprocessing.get_context(method)
    found = context.Queue()
    ranks = [context.Process(target=train_a_rank, args=(dataset, step, found)) for step in (0, 60)]
    for rank in ranks:
        rank.start()
    iterator = iter(dataset)
    own = take(iterator, 3)
    of_ranks = dict(found.get(timeout=100) for _ in ranks)
    for rank in ranks:
        rank.join(100)
    dataset.report_loss(2.0)
    assert own + take(iterator, 3) == expected[:6]
    assert of_ranks == {0: expected[:10], 60: expected[60:70]}


def test_persistent_workers_say_what_they_cannot_know(six_shards: TokenStore, make_dataset: Make) -> None:
    dataset = make_dataset(six_shards)
    loader = workers(dataset, 2, persistent_workers=True)
    take(loader, 5)
    with pytest.raises(LoaderUsageError, match="broken off"):
        take(loader, 5)
    dataset = make_dataset(six_shards, **FINITE)
    state = dataset.state_dict()
    loader = workers(dataset, 2, persistent_workers=True)
    take(loader)
    dataset.load_state_dict(state)
    with pytest.raises(LoaderUsageError, match="was moved"):
        take(loader)


def test_an_error_in_a_worker_is_the_trainers(tmp_path: Path, make_dataset: Make) -> None:
    store = TokenStore.of(tmp_path / "store", 1)
    for path in (*store.folder.glob("*.pt"), *store.folder.glob("packed/*")):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    dataset = make_dataset(store, cache_dir=tmp_path / "cache")
    with pytest.raises(CorruptObjectError, match=r"shard_0\.pt"):
        take(workers(dataset, 1), 1)


def stateful(dataset: GenesisDataset, workers: int, state: Any = None) -> StatefulDataLoader[Any]:
    loader = StatefulDataLoader(dataset, batch_size=None, num_workers=workers, timeout=60 if workers else 0)
    if state is not None:
        loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("k", [0, 3, 18])
def test_going_on_behind_k_batches(six_shards: TokenStore, make_dataset: Make, workers: int, k: int) -> None:
    expected = take(make_dataset(six_shards), k + 12)
    loader = stateful(make_dataset(six_shards), workers)
    assert take(loader, k) == expected[:k]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    resumed = stateful(make_dataset(six_shards), workers, state=state)
    assert take(resumed, 6) == expected[k : k + 6]
    again = stateful(make_dataset(six_shards), workers, state=resumed.state_dict())
    assert take(again, 6) == expected[k + 6 :]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "batch_size"), [(0, 4), (2, 4), (4, 1)])
def test_finite_passes(six_shards: TokenStore, make_dataset: Make, workers: int, batch_size: int) -> None:
    options = {**FINITE, "batch_size": batch_size}
    direct = make_dataset(six_shards, **options)
    expected = [take(direct) for _ in range(3)]
    length = len(expected[0])
    loader = stateful(make_dataset(six_shards, **options), workers)
    assert take(loader) == expected[0]
    for k in {length // 2, length - 1, length}:
        begun = stateful(make_dataset(six_shards, **options), workers)
        iterator = iter(begun)
        assert take(iterator, k) == expected[0][:k]
        state = copy.deepcopy(begun.state_dict())
        resumed = stateful(make_dataset(six_shards, **options), workers, state=state)
        torch.manual_seed(3)
        assert take(resumed) == expected[0][k:]
        assert take(resumed) == expected[1]
    finished = copy.deepcopy(loader.state_dict())
    resumed = stateful(make_dataset(six_shards, **options), workers, state=finished)
    assert take(resumed) == expected[1]
    assert take(resumed) == expected[2]
    assert [take(loader), take(loader)] == expected[1:]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_rotations_survive(six_shards: TokenStore, make_dataset: Make, workers: int) -> None:
    options = {"plateau": QUICK, "seq_len": 32}

    def train(dataset: GenesisDataset, loader: StatefulDataLoader[Any], first: int, last: int) -> list[str]:
        found = []
        for step, batch in zip(range(first, last), loader, strict=False):
            found.append(digest(batch))
            dataset.report_loss(0.01 if step % 20 > 9 else 2.0)
        return found

    dataset = make_dataset(six_shards, **options)
    loader = stateful(dataset, workers)
    found = train(dataset, loader, 0, 44)
    # A rotation is under way here: some workers have heard of it, others not yet.
    state, before = copy.deepcopy(loader.state_dict()), dataset.rotations
    assert before
    resumed = make_dataset(six_shards, **options)
    loader = stateful(resumed, workers, state=state)
    found += train(resumed, loader, 44, 100)
    rotations = resumed.rotations
    assert len(rotations) > len(before) - 1
    assert {step for step in rotations if step < 44} == {step for step in before if step < 44}
    reference = make_dataset(six_shards, **options)
    expected = [digest(reference.replay("node-a", step, rotations=rotations)) for step in range(100)]
    assert found == expected


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerBoard:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return WorkerBoard()


def _spawned_copy(board: WorkerBoard) -> WorkerBoard:
    """As a worker has it."""
    multiprocessing.context.set_spawning_popen(object())
    try:
        return pickle.loads(pickle.dumps(board))
    finally:
        multiprocessing.context.set_spawning_popen(None)


@pytest.fixture
def holder(board: WorkerBoard, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the board locked, as one that was stopped has."""
    board.reset(0, ())
    [path] = tmp_path.glob("genesis-workers-*")
    program = (
        "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process


def test_a_board_that_stays_locked_is_an_error_that_names_the_holder(board, holder, monkeypatch):
    monkeypatch.setattr("loader.shared_stream._LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(LoaderError, match=f"locked by (process {holder.pid}|another process);"):
        board.look()
    waiting = threading.Thread(target=_swallow, args=(board,))
    waiting.start()
    with pytest.raises(LoaderError, match="to be free within"):
        board.look()
    waiting.join()
    holder.communicate("")
    assert board.look().furthest == -1


def _swallow(board: WorkerBoard) -> None:
    with pytest.raises(LoaderError):
        board.look()


def test_a_fork_while_a_thread_waits_with_the_lock(board: WorkerBoard, holder: subprocess.Popen[str]) -> None:
    """The child has the threads' lock, but not the thread that would give it back."""
    began = threading.Event()

    def wait() -> None:
        began.set()
        board.look()

    thread = threading.Thread(target=wait)
    thread.start()
    began.wait()
    pid = os.fork()
    if pid == 0:
        try:
            board.look()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    holder.communicate("")
    thread.join()


@pytest.mark.slow
def test_no_file_is_left(tmp_path: Path) -> None:
    program = (
        "import os, pickle; from loader.shared_stream import WorkerBoard\n"
        "board = WorkerBoard(); board.look(); other = pickle.loads(pickle.dumps(board)); other.reset(3, (1,))\n"
        "print(len(os.listdir(os.environ['TMPDIR'])))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60, capture_output=True)
    assert done.stdout == b"2\n"
    assert not list(tmp_path.iterdir())


def test_a_pass_that_begins_again_is_told_once(board: WorkerBoard, caplog: pytest.LogCaptureFixture) -> None:
    for worker in (0, 1):
        assert board.join_pass(worker, 77, 30, resumed=False) == 30
    again = _spawned_copy(board), _spawned_copy(board)
    assert [each.join_pass(worker, 78, 30, resumed=False) for worker, each in enumerate(again)] == [30, 30]
    assert not caplog.records  # Nothing had been made of that pass.
    again[0].announce(30, 0)
    third = _spawned_copy(board), _spawned_copy(board)
    assert [each.join_pass(worker, 79, 30, resumed=False) for worker, each in enumerate(third)] == [30, 30]
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "batches from step 30 come again; to go on call load_state_dict(state_dict(step=N))" in record.message
    third[0].announce(30, 0)
    third[0].end_pass(31)
    fourth = _spawned_copy(board)
    assert fourth.join_pass(0, 80, 30, resumed=False) == 31
    assert len(caplog.records) == 1
