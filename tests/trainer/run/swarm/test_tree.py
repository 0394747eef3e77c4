"""Real child processes: started again when they die, ended whole, never outliving the tree, never a stranger's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.dht_processes import descendants, wait_until_gone
from tests.support.small_children import DIES, ENDS, OBEYS, STUBBORN, small_child, up
from trainer.run.swarm.children import Child, RestartPolicy
from trainer.run.swarm.tree import Outcome, ProcessTree

_ROOT = Path(__file__).resolve().parents[4]
_WITHIN_S = 40.0
QUICK = RestartPolicy(first_pause_s=0.05, max_pause_s=0.2, max_failures=3)


class Watched:
    """A tree and what it told."""

    def __init__(self, folder: Path, policy: RestartPolicy, grace_s: float, asked: Callable[[], bool]) -> None:
        self.told: list[str] = []
        self.tree = ProcessTree(folder, policy, tell=self.told.append, grace_s=grace_s, asked=asked)
        self.folder = folder

    def until(self, holds: Callable[[], bool]) -> Outcome | None:
        """Looks after the tree until something holds or it is over."""
        deadline_s = time.monotonic() + _WITHIN_S
        while not holds():
            outcome = self.tree.look()
            if outcome is not None:
                return outcome
            assert time.monotonic() < deadline_s, self.told
            time.sleep(0.01)
        return None

    def until_over(self) -> Outcome:
        outcome = self.until(lambda: False)
        assert outcome is not None
        return outcome

    def until_up(self, *children: Child) -> None:
        assert self.until(lambda: all(up(child.log_path) for child in children)) is None

    def pids(self) -> set[int]:
        return {child.pid for child in self.tree.children if child.pid is not None}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def tree(
        policy: RestartPolicy = QUICK, grace_s: float = 30.0, asked: Callable[[], bool] = lambda: False
    ) -> Watched:
        made.append(Watched(tmp_path, policy, grace_s, asked))
        return made[-1]

    yield tree
    for watched in made:
        for child in watched.tree.children:
            child.kill()
        watched.tree.end()


def test_it_is_done_when_all_drivers_are_and_ends_the_others(make: Callable[..., Watched]) -> None:
    watched = make()
    with watched.tree as tree:
        worker = tree.add(small_child("head.1", OBEYS))
        watched.until_up(worker)
        pids = watched.pids()
        tree.add(small_child("driver-1", ENDS, "driver"))
        tree.add(small_child("driver-2", ENDS, "driver"))
        assert watched.until_over() == Outcome(0, "all drivers are done")
        assert worker.status == "running"
    wait_until_gone(pids)
    assert worker.exit_code == -signal.SIGTERM
    assert tree.num_killed == 0


def test_a_child_that_is_killed_is_started_again(make: Callable[..., Watched]) -> None:
    watched = make()
    with watched.tree as tree:
        worker = tree.add(small_child("head.1", OBEYS))
        watched.until_up(worker)
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert watched.until(lambda: worker.num_restarts == 1) is None
        assert worker.pid not in (None, first)
        assert tree.num_restarts == 1
    assert "head.1 ended (SIGKILL); started again in 0.05 s" in watched.told[0]
    assert watched.told[1] == "head.1 is started again (the 1st time)"
    assert worker.log_path.read_text().count("--- ") == 2


def test_one_that_dies_again_and_again_ends_the_tree_and_is_quoted(make: Callable[..., Watched]) -> None:
    watched = make()
    with watched.tree as tree:
        tree.add(small_child("tail.1", OBEYS, stage="tail"))
        bad = tree.add(small_child("head.1", DIES))
        outcome = watched.until_over()
        pids = watched.pids()
    wait_until_gone(pids)
    assert outcome.exit_code == 1
    assert "head.1 cannot be kept alive (exit code 1): the disk is full; all of it is in" in outcome.reason
    assert bad.num_restarts == QUICK.max_failures - 1
    assert [text.partition("again in ")[2].partition(";")[0] for text in watched.told if "again in" in text] == [
        "0.05 s",
        "0.1 s",
    ]


def test_a_steady_life_is_forgiven_what_was_before(make: Callable[..., Watched]) -> None:
    watched = make(RestartPolicy(first_pause_s=0.01, steady_s=0.0, max_failures=2))
    with watched.tree as tree:
        flaky = tree.add(small_child("head.1", DIES))
        assert watched.until(lambda: flaky.num_restarts == 3) is None


def test_options_that_make_no_sense_are_not_tried_again(make: Callable[..., Watched]) -> None:
    watched = make()
    with watched.tree as tree:
        wrong = tree.add(small_child("head.1", "import sys; print('trainer: preset: expected one'); sys.exit(2)"))
        outcome = watched.until_over()
    assert outcome == Outcome(2, "head.1: preset: expected one")
    assert watched.told == [f"head.1 cannot begin (exit code 2); see {wrong.log_path}"]
    assert wrong.num_restarts == 0


def test_the_reason_is_what_a_child_says_itself_in_its_last_life(make: Callable[..., Watched], tmp_path: Path) -> None:
    log = tmp_path / "head.1.log"
    log.write_text("--- an earlier life\ntrainer: another reason\n")
    talks = "print('INFO up'); print('trainer: the disk is full'); print('WARNING a thread ended late'); exit({})"
    watched = make(RestartPolicy(enabled=False))
    with watched.tree as tree:
        child = tree.add(small_child("head.1", talks.format(1)))
        assert watched.until(lambda: child.status == "dead") is None
        assert child.last_words() == "the disk is full"
        log.write_text(log.read_text() + "--- a later life\n")
        assert child.last_words() == "it said nothing"


def test_without_restarts_the_others_go_on_until_the_drivers_are_done(make: Callable[..., Watched]) -> None:
    watched = make(RestartPolicy(enabled=False))
    with watched.tree as tree:
        tree.add(small_child("head.1", OBEYS))
        dies = tree.add(small_child("head.2", DIES))
        assert watched.until(lambda: dies.status == "dead") is None
        tree.add(small_child("driver-1", ENDS, "driver"))
        assert watched.until_over() == Outcome(0, "all drivers are done")


def test_without_restarts_a_dead_driver_is_a_failure(make: Callable[..., Watched]) -> None:
    watched = make(RestartPolicy(enabled=False))
    with watched.tree as tree:
        tree.add(small_child("driver-1", DIES, "driver"))
        outcome = watched.until_over()
    assert outcome.exit_code == 1 and "driver-1 cannot be kept alive" in outcome.reason


def test_a_stage_nobody_holds_any_more_ends_the_tree(
    make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.swarm.tree._EMPTY_STAGE_S", 0.1)
    watched = make(RestartPolicy(enabled=False))
    with watched.tree as tree:
        tree.add(small_child("driver-1", OBEYS, "driver"))
        tree.add(small_child("head.1", OBEYS))
        tree.add(small_child("tail.1", DIES, stage="tail"))
        assert watched.until_over() == Outcome(1, "no worker of stage tail is left")


def test_drivers_end_before_workers_and_workers_before_seeds(make: Callable[..., Watched], tmp_path: Path) -> None:
    """So that what is under way is settled while there is somebody to answer."""
    notes = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('up', flush=True); "
        "signal.sigwait([signal.SIGTERM]); open({log!r}, 'a').write({name!r})"
    )
    log = str(tmp_path / "order")
    watched = make()
    with watched.tree as tree:
        children = [
            tree.add(small_child(name, notes.format(log=log, name=role[0]), role))
            for name, role in (("seed-1", "seed"), ("head.1", "worker"), ("driver-1", "driver"))
        ]
        watched.until_up(*children)
    assert Path(log).read_text() == "dws"


def test_one_that_does_not_end_is_killed_and_counted(make: Callable[..., Watched]) -> None:
    watched = make(grace_s=0.3)
    with watched.tree as tree:
        children = [tree.add(small_child("head.1", STUBBORN)), tree.add(small_child("driver-1", OBEYS, "driver"))]
        watched.until_up(*children)
        pids = watched.pids()
    wait_until_gone(pids)
    assert tree.num_killed == 1
    assert "head.1: not ended 0.3 s after SIGTERM; killed" in watched.told[-1]


def test_a_second_ctrl_c_kills_what_is_left(make: Callable[..., Watched]) -> None:
    watched = make(grace_s=600.0)
    watched.until_up(watched.tree.add(small_child("head.1", STUBBORN)))
    pids = watched.pids()
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            watched.tree.end()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wait_until_gone(pids)
    assert watched.told == ["interrupted: killing head.1; what they have not saved is lost, checkpoints stay whole"]


def test_while_it_is_ending_it_says_now_and_then_what_is_waited_for(
    make: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.run.swarm.tree._SAY_S", 0.2)
    watched = make(grace_s=2.0)
    with watched.tree as tree:
        watched.until_up(tree.add(small_child("head.1", STUBBORN)), tree.add(small_child("tail.1", OBEYS)))
    waiting = "waiting for head.1 to answer what is under way, save and hand over; killed in "
    assert any(told.startswith(waiting) for told in watched.told)
    assert watched.told[-1] == "head.1: not ended 2 s after SIGTERM; killed"


@pytest.mark.parametrize("was_asked_before", [True, False])
def test_who_asks_for_the_end_while_it_is_ending_hears_what_is_waited_for(
    was_asked_before: bool, make: Callable[..., Watched]
) -> None:
    answers = iter([was_asked_before, False])
    watched = make(grace_s=0.3, asked=lambda: next(answers, True))
    with watched.tree as tree:
        watched.until_up(tree.add(small_child("head.1", STUBBORN)))
    told = [text for text in watched.told if "Ctrl+C" in text]
    assert told == ([] if was_asked_before else ["ending already, waiting for head.1; Ctrl+C again kills what is left"])


def test_an_error_of_the_one_who_watches_ends_the_children_too(make: Callable[..., Watched]) -> None:
    watched = make()
    with pytest.raises(RuntimeError), watched.tree as tree:
        watched.until_up(tree.add(small_child("head.1", OBEYS)))
        pids = watched.pids()
        raise RuntimeError("a display that broke")
    wait_until_gone(pids)


def test_a_child_that_was_waited_for_is_sent_nothing(make: Callable[..., Watched], monkeypatch) -> None:
    """Its number may be another process's by now."""
    watched = make(RestartPolicy(enabled=False))
    child = watched.tree.add(small_child("head.1", ENDS))
    assert watched.until(lambda: child.status == "dead") is None
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    child.ask_to_end()
    child.kill()
    assert child.has_ended() and child.pid is None


_PARENT = """
import sys, time
from pathlib import Path
from tests.support.small_children import STUBBORN, OBEYS, small_child, up
from trainer.run.swarm.children import RestartPolicy
from trainer.run.swarm.tree import ProcessTree

with ProcessTree(Path(sys.argv[1]), RestartPolicy()) as tree:
    children = [tree.add(small_child("head.1", STUBBORN)), tree.add(small_child("driver-1", OBEYS, "driver"))]
    while not all(up(child.log_path) for child in children):
        time.sleep(0.02)
    print(*[child.pid for child in children], flush=True)
    time.sleep(600)
"""


def test_no_orphans_when_the_tree_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], cwd=_ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    family: set[int] = set()
    try:
        family = {int(pid) for pid in parent.stdout.readline().split()}
        assert family == descendants(parent.pid) and len(family) == 2
        parent.kill()
        parent.wait(10)
        wait_until_gone(family)
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def test_a_child_of_a_parent_that_is_gone_does_not_begin(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    command = [
        sys.executable,
        "-m",
        "trainer.run.swarm.parent_death_signal",
        "1",
        sys.executable,
        "-c",
        f"open({str(mark)!r}, 'w')",
    ]
    assert subprocess.run(command, cwd=_ROOT, timeout=30, check=False).returncode == 1
    assert not mark.exists()
