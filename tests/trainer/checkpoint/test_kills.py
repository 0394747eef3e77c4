"""Processes killed at each step of a save, of a node or of a stage: what is on the disk is whole."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.checkpoint_actor import ACTOR_RUN, Death, actor_value, newest_step, save, save_as_actor


@dataclass(frozen=True)
class _Kind:
    """How it saves and is read, the least kills of a save, and its files when two are kept."""

    save: Callable[[str, int, Death], None]
    newest: Callable[[Path], int | None]
    num_kills: int
    num_files: int
    folder: str = ""


_KINDS = {"node": _Kind(save, newest_step, 6, 3), "stage": _Kind(save_as_actor, actor_value, 3, 2, f"{ACTOR_RUN}/head")}
_NUM_EVENTS = 20
"""More than a save has: the last ones are saves that succeed."""


@pytest.fixture(params=_KINDS)
def kind(request: pytest.FixtureRequest) -> _Kind:
    return _KINDS[request.param]


def _exitcode(kind: _Kind, folder: Path, step: int, death: Death) -> int | None:
    """Of a process of its own that saves; torch and the trainer are imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.checkpoint_actor"])
    process = context.Process(target=kind.save, args=(str(folder), step, death))
    process.start()
    process.join(60)
    process.kill()
    return process.exitcode


def _check_tidy(kind: _Kind, folder: Path, step: int) -> None:
    """The next save leaves nothing behind of those that were killed."""
    for each in (step, step + 1):
        kind.save(str(folder), each, Death())
    assert kind.newest(folder) == step + 1
    assert len(list((folder / kind.folder).glob("*.pt"))) == kind.num_files
    assert not list((folder / kind.folder).glob(".*.tmp"))


@pytest.mark.slow
def test_killed_at_each_of_the_steps_of_a_save(kind: _Kind, tmp_path: Path) -> None:
    kind.save(str(tmp_path), 1, Death())
    newest, killed, advanced = 1, 0, 0
    for event in range(1, _NUM_EVENTS):
        exitcode = _exitcode(kind, tmp_path, event + 1, Death(at_event=event))
        found = kind.newest(tmp_path)
        assert exitcode in (0, -signal.SIGKILL)
        assert found in (newest, event + 1)
        assert found == event + 1 or exitcode
        killed += exitcode != 0
        advanced += exitcode != 0 and found == event + 1
        newest = found
    assert kind.num_kills <= killed < _NUM_EVENTS - 1
    assert 1 <= advanced < killed  # Behind the rename it is the new one that counts.
    _check_tidy(kind, tmp_path, _NUM_EVENTS + 1)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9])
def test_killed_in_the_midst_of_writing(kind: _Kind, tmp_path: Path, share: float) -> None:
    kind.save(str(tmp_path), 1, Death())
    size_bytes = next((tmp_path / kind.folder).glob("*.pt")).stat().st_size
    assert _exitcode(kind, tmp_path, 2, Death(at_bytes=int(size_bytes * share))) == -signal.SIGXFSZ
    assert list((tmp_path / kind.folder).glob(".*.tmp"))
    assert kind.newest(tmp_path) == 1
    _check_tidy(kind, tmp_path, 3)
