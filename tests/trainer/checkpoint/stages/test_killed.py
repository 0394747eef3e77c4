"""Killed at any moment of a write, what was there before, or the new file, is whole and found."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.support.checkpoint_actor import Death
from tests.support.stage_files import ACTOR_RUN, actor_value, save_as_actor

Start = Callable[..., ForkServerProcess]

_NUM_EVENTS = 11
"""More than a save has: the last ones succeed."""


def _exitcode(process: ForkServerProcess) -> int:
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.slow
def test_killed_at_each_of_the_steps_of_a_save(tmp_path: Path, start: Start) -> None:
    save_as_actor(str(tmp_path), 1, Death())
    newest, killed, advanced = 1, 0, 0
    for event in range(1, _NUM_EVENTS):
        exitcode = _exitcode(start(save_as_actor, str(tmp_path), event + 1, Death(at_event=event)))
        found = actor_value(tmp_path)
        assert exitcode in (0, -signal.SIGKILL)
        assert found in (newest, event + 1)
        assert found == event + 1 or exitcode
        killed += exitcode != 0
        advanced += exitcode != 0 and found == event + 1
        newest = found
    assert 3 <= killed < _NUM_EVENTS - 1
    assert 1 <= advanced < killed  # Behind the rename it is the new one that counts.
    save_as_actor(str(tmp_path), 50, Death())
    left = [path.name for path in (tmp_path / ACTOR_RUN / "head").iterdir()]
    assert len(left) == 2 and all(name.endswith("-actor.pt") for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.9])
def test_killed_in_the_midst_of_writing(tmp_path: Path, start: Start, share: float) -> None:
    save_as_actor(str(tmp_path), 1, Death())
    size = next((tmp_path / ACTOR_RUN / "head").iterdir()).stat().st_size
    process = start(save_as_actor, str(tmp_path), 2, Death(at_bytes=int(size * share)))
    assert _exitcode(process) == -signal.SIGXFSZ
    assert list((tmp_path / ACTOR_RUN / "head").glob(".*.tmp"))
    assert actor_value(tmp_path) == 1
