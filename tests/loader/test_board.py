"""What DataLoader workers and the process that trains tell each other: nothing lost, nothing waited for without end."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from loader import LoaderError
from loader.shared_stream import NEVER, WorkerBoard


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerBoard:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return WorkerBoard()


def test_a_worker_is_told_only_what_is_new(board: WorkerBoard) -> None:
    board.reset(10, (3, 7))
    assert board.announce(10, 0) == (3, 7)
    assert board.announce(11, 2) == ()
    assert board.rotate() == 12
    assert board.announce(12, 2) == (12,)
    # What another worker knows from a state comes behind, whatever its step.
    board.merge((3, 5, 12))
    assert board.announce(13, 3) == (5,)
    assert board.rotations() == (3, 7, 12, 5)


def test_a_worker_of_before_the_move_hears_everything(board: WorkerBoard) -> None:
    board.reset(10, (3, 7, 9))
    theirs = _spawned_copy(board)
    board.reset(4, (3,))
    assert theirs.announce(14, 3) == (3,)
    assert board.announce(14, 1) == ()


def _spawned_copy(board: WorkerBoard) -> WorkerBoard:
    """As a worker has it."""
    from multiprocessing import context

    context.set_spawning_popen(object())
    try:
        return pickle.loads(pickle.dumps(board))
    finally:
        context.set_spawning_popen(None)


def test_threads_do_not_lose_each_others_rotations(board: WorkerBoard) -> None:
    def rotate() -> None:
        for _ in range(100):
            board.rotate()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=rotate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(board.rotations()) == 400


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


def test_a_board_that_stays_locked_is_an_error_that_names_the_holder(
    board: WorkerBoard, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("copied", [lambda board: pickle.loads(pickle.dumps(board)), copy.deepcopy])
def test_a_copy_begins_with_what_was_known_and_goes_on_alone(board: WorkerBoard, copied: object) -> None:
    board.reset(5, (2,))
    board.announce(8, 0)
    other = copied(board)  # type: ignore[operator]
    assert (other.look().furthest, other.look().end, other.rotations()) == (8, NEVER, (2,))
    other.reset(20, (1, 2, 3))
    assert (board.look().furthest, board.rotations()) == (8, (2,))
    board.announce(9, 0)
    assert other.look().furthest == 19


def test_a_forked_process_goes_on_alone(board: WorkerBoard) -> None:
    board.reset(5, (2,))
    context = multiprocessing.get_context("fork")
    found: SimpleQueue[object] = context.SimpleQueue()

    def child() -> None:
        found.put((board.look().furthest, board.rotations()))
        board.reset(20, (1,))
        found.put((board.look().furthest, board.rotations()))

    process = context.Process(target=child)
    process.start()
    assert [found.get(), found.get()] == [(4, (2,)), (19, (1,))]
    process.join()
    assert (board.look().furthest, board.rotations()) == (4, (2,))


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
