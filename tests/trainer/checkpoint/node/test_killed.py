"""Killed at any moment of a save a node finds a whole checkpoint, and goes on from it to the bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.support.checkpoint_actor import NUM_VALUES, WALLET, Death, check, contents, save, train
from trainer.checkpoint.node import Checkpointer, load_newest

Start = Callable[..., ForkServerProcess]

_NUM_EVENTS = 20
"""More than a save has: the last ones are saves that succeed."""


def _ended(process: ForkServerProcess) -> int:
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def _found(folder: Path) -> int:
    found = load_newest(folder, WALLET)
    assert found is not None
    return check(found)


@pytest.mark.slow
def test_killed_at_each_of_the_steps_of_a_save(tmp_path: Path, start: Start) -> None:
    with Checkpointer(tmp_path, WALLET, keep=2) as checkpointer:
        checkpointer.save(contents(0), wait=True)
    newest, killed, advanced = 0, 0, 0
    for event in range(1, _NUM_EVENTS):
        exitcode = _ended(start(save, str(tmp_path), event, Death(at_event=event)))
        assert exitcode in (0, -signal.SIGKILL)
        found = _found(tmp_path)
        assert found in (newest, event)
        assert found == event or exitcode
        killed += exitcode != 0
        advanced += exitcode != 0 and found == event
        newest = found
    assert 6 <= killed < _NUM_EVENTS - 1
    assert 1 <= advanced < killed  # Behind the rename it is the new one that counts.
    _check_tidy(tmp_path, newest + 1)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_killed_in_the_midst_of_writing(tmp_path: Path, start: Start, share: float) -> None:
    with Checkpointer(tmp_path, WALLET, keep=2) as checkpointer:
        checkpointer.save(contents(1), wait=True)
    process = start(save, str(tmp_path), 2, Death(at_bytes=int(NUM_VALUES * 4 * share)))
    assert _ended(process) == -signal.SIGXFSZ
    assert list(tmp_path.glob(".*.tmp"))
    assert _found(tmp_path) == 1
    _check_tidy(tmp_path, 3)


@pytest.mark.slow
def test_training_goes_on_to_the_bit_in_new_processes(tmp_path: Path, start: Start) -> None:
    whole, parted, killed = (tmp_path / name for name in ("whole", "parted", "killed"))
    running = [
        start(train, str(tmp_path / "a"), 30, str(whole)),
        start(train, str(tmp_path / "b"), 17, str(parted)),
        start(train, str(tmp_path / "c"), 17, str(killed), die=True),
    ]
    assert [_ended(process) for process in running] == [0, 0, -signal.SIGKILL]
    running = [start(train, str(tmp_path / name), 30, str(file)) for name, file in (("b", parted), ("c", killed))]
    assert [_ended(process) for process in running] == [0, 0]
    assert whole.read_bytes() == parted.read_bytes() == killed.read_bytes()


def _check_tidy(folder: Path, step: int) -> None:
    """The next save leaves nothing behind of those that were killed."""
    with Checkpointer(folder, WALLET, keep=2) as checkpointer:
        checkpointer.save(contents(step), wait=True)
        checkpointer.save(contents(step + 1), wait=True)
    assert _found(folder) == step + 1
    assert len(list(folder.glob("*.pt"))) == 3
    assert not list(folder.glob(".*.tmp"))
