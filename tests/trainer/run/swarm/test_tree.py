"""Real child processes: restarted when they die, ended whole, never outliving the tree, no other process signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.waiting import descendants, wait_until_gone
from trainer.run.swarm.tree import Child, ChildSpec, ExitStatus, ProcessTree, RestartPolicy, Role

_ROOT = Path(__file__).resolve().parents[4]
_WITHIN_S = 40.0
QUICK = RestartPolicy(first_pause_s=0.05, max_pause_s=0.2, max_failures=3)
NO_RESTART = RestartPolicy(enabled=False)

# A few lines of Python each, with neither torch nor network.
OBEYS = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEYS}"
ENDS = "print('ready')"
DIES = "import sys; print('trainer: the disk is full', file=sys.stderr); sys.exit(1)"


class Watched(ProcessTree):
    """A tree and what it told."""

    def __init__(self, folder: Path, policy: RestartPolicy, grace_s: float) -> None:
        self.told: list[str] = []
        self.pids: set[int] = set()
        super().__init__(folder, policy, tell=self.told.append, grace_s=grace_s)

    def begin(self, name: str, program: str, role: Role = "worker", stage: str = "head") -> Child:
        command = (sys.executable, "-S", "-c", program)
        return self.add(ChildSpec(name=name, role=role, stage=stage if role == "worker" else "", command=command))

    def until(self, holds: Callable[[], bool]) -> ExitStatus | None:
        """Looks after the tree until something holds or it is over."""
        deadline_s = time.monotonic() + _WITHIN_S
        while not holds():
            status = self.look()
            if status is not None:
                return status
            assert time.monotonic() < deadline_s, self.told
            time.sleep(0.01)
        return None

    def until_over(self) -> ExitStatus:
        status = self.until(lambda: False)
        assert status is not None
        self._note_pids()
        return status

    def until_up(self, *children: Child) -> None:
        assert self.until(lambda: all("\nup\n" in child.log_path.read_text() for child in children)) is None
        self._note_pids()

    def _note_pids(self) -> None:
        self.pids |= {child.pid for child in self.children if child.pid is not None}


Make = Callable[..., Watched]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Watched] = []

    def tree(policy: RestartPolicy = QUICK, grace_s: float = 30.0) -> Watched:
        made.append(Watched(tmp_path, policy, grace_s))
        return made[-1]

    yield tree
    for watched in made:
        for child in watched.children:
            child.kill()
        watched.end()


def test_a_killed_child_is_restarted_and_ended_when_all_drivers_are_done(make: Make) -> None:
    with make() as watched:
        worker = watched.begin("head.1", OBEYS)
        watched.until_up(worker)
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert watched.until(lambda: worker.num_restarts == 1) is None
        assert worker.pid not in (None, first)
        assert watched.until(lambda: worker.log_path.read_text().count("\nup\n") == 2) is None
        watched.begin("driver-1", ENDS, "driver")
        watched.begin("driver-2", ENDS, "driver")
        assert watched.until_over() == ExitStatus(0, "all drivers are done")
        assert worker.status == "running"
    wait_until_gone(watched.pids)
    assert worker.exit_code == -signal.SIGTERM
    assert not worker.was_killed
    assert "head.1 ended (SIGKILL); started again in 0.05 s" in watched.told[0]
    assert watched.told[1] == "head.1 is started again (restart 1)"
    assert worker.log_path.read_text().count("--- ") == 2


def test_one_that_dies_again_and_again_ends_the_tree_and_is_quoted(make: Make) -> None:
    with make() as watched:
        watched.begin("tail.1", OBEYS, stage="tail")
        bad = watched.begin("head.1", DIES)
        status = watched.until_over()
    wait_until_gone(watched.pids)
    assert status.exit_code == 1
    assert "head.1 cannot be kept alive (exit code 1): the disk is full; all of it is in" in status.reason
    assert bad.num_restarts == QUICK.max_failures - 1
    pauses = [text.partition("again in ")[2].partition(";")[0] for text in watched.told if "again in" in text]
    assert pauses == ["0.05 s", "0.1 s"]


def test_a_steady_life_clears_failures_and_options_that_make_no_sense_are_not_tried_again(make: Make) -> None:
    with make(RestartPolicy(first_pause_s=0.01, steady_s=0.0, max_failures=2)) as watched:
        flaky = watched.begin("head.1", DIES)
        assert watched.until(lambda: flaky.num_restarts == 3) is None
    with make() as watched:
        wrong = watched.begin("head.1", "import sys; print('trainer: preset: expected one'); sys.exit(2)")
        assert watched.until_over() == ExitStatus(2, "head.1: preset: expected one")
    assert watched.told == [f"head.1 cannot begin (exit code 2); see {wrong.log_path}"]
    assert wrong.num_restarts == 0


def test_the_reason_is_of_the_last_life_and_what_was_waited_for_is_sent_nothing(make, tmp_path, monkeypatch):
    log = tmp_path / "head.1.log"
    log.write_text("--- an earlier life\ntrainer: another reason\n")
    says = "print('INFO up'); print('trainer: the disk is full'); print('WARNING late'); exit(1)"
    with make(NO_RESTART) as watched:
        child = watched.begin("head.1", says)
        assert watched.until(lambda: child.status == "dead") is None
        assert child.last_words() == "the disk is full"
        log.write_text(log.read_text() + "--- a later life\n")
        assert child.last_words() == "it printed nothing"
        # Its process id may be another process's by now.
        monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
        child.send(signal.SIGTERM)
        child.kill()
        assert child.has_ended() and child.pid is None
        monkeypatch.undo()


def test_without_restarts_it_ends_with_the_drivers_or_a_whole_stage(make, monkeypatch):
    with make(NO_RESTART) as watched:
        watched.begin("head.1", OBEYS)
        dies = watched.begin("head.2", DIES)
        assert watched.until(lambda: dies.status == "dead") is None
        watched.begin("driver-1", ENDS, "driver")
        assert watched.until_over() == ExitStatus(0, "all drivers are done")
        watched.begin("driver-2", DIES, "driver")
        status = watched.until_over()
    assert status.exit_code == 1 and "driver-2 cannot be kept alive" in status.reason
    monkeypatch.setattr("trainer.run.swarm.tree._EMPTY_STAGE_S", 0.1)
    with make(NO_RESTART) as watched:
        watched.begin("driver-1", OBEYS, "driver")
        watched.begin("head.1", OBEYS)
        watched.begin("tail.1", DIES, stage="tail")
        assert watched.until_over() == ExitStatus(1, "no worker of stage tail is left")


def test_drivers_end_before_workers_and_workers_before_seeds(make: Make, tmp_path: Path) -> None:
    """So that what is under way is settled while there is somebody to answer."""
    notes = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print('up', flush=True); "
        "signal.sigwait([signal.SIGTERM]); open({log!r}, 'a').write({name!r})"
    )
    log = str(tmp_path / "order")
    roles: list[tuple[str, Role]] = [("seed-1", "seed"), ("head.1", "worker"), ("driver-1", "driver")]
    with make() as watched:
        watched.until_up(*(watched.begin(name, notes.format(log=log, name=role[0]), role) for name, role in roles))
    assert Path(log).read_text() == "dws"


def test_one_that_does_not_end_is_killed_and_waited_for_meanwhile(make, monkeypatch):
    monkeypatch.setattr("trainer.run.swarm.tree._SAY_S", 0.2)
    with make(grace_s=2.0) as watched:
        children = [watched.begin("head.1", STUBBORN), watched.begin("driver-1", OBEYS, "driver")]
        watched.until_up(*children)
    wait_until_gone(watched.pids)
    assert [child.was_killed for child in children] == [True, False]
    waiting = "waiting for head.1 to answer what is under way, save and hand over; killed in "
    assert any(told.startswith(waiting) for told in watched.told)
    assert watched.told[-1] == "head.1: not ended 2 s after SIGTERM; killed"


def test_a_second_ctrl_c_kills_what_is_left_and_an_error_ends_it(make: Make) -> None:
    watched = make(grace_s=600.0)
    watched.until_up(watched.begin("head.1", STUBBORN))
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            watched.end()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    wait_until_gone(watched.pids)
    assert watched.told == ["interrupted: killing head.1; their unsaved work is lost, checkpoints stay whole"]
    with pytest.raises(RuntimeError), make() as watched:  # So does an error of the caller, in order.
        watched.until_up(watched.begin("head.2", OBEYS))
        raise RuntimeError("a display that broke")
    wait_until_gone(watched.pids)


_PARENT = f"""
import sys, time
from pathlib import Path
from trainer.run.swarm.tree import ChildSpec, ProcessTree, RestartPolicy

with ProcessTree(Path(sys.argv[1]), RestartPolicy()) as tree:
    for name, role, program in (("head.1", "worker", {STUBBORN!r}), ("driver-1", "driver", {OBEYS!r})):
        tree.add(ChildSpec(name=name, role=role, command=(sys.executable, "-S", "-c", program)))
    while not all("\\nup\\n" in child.log_path.read_text() for child in tree.children):
        time.sleep(0.02)
    print(*[child.pid for child in tree.children], flush=True)
    time.sleep(600)
"""


def test_no_orphans_when_the_tree_is_killed_before_or_after_they_begin(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
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
    # A child of a parent that is gone does not begin.
    mark = tmp_path / "ran"
    program = f"open({str(mark)!r}, 'w')"
    command = [sys.executable, "-m", "trainer.run.swarm.parent_death_signal", "1", sys.executable, "-c", program]
    assert subprocess.run(command, cwd=_ROOT, timeout=30, check=False).returncode == 1
    assert not mark.exists()
