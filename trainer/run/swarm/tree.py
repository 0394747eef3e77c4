"""A tree of processes: a swarm as children of one, which watches and ends them together.

    with ProcessTree(folder, RestartPolicy(), tell=logger.info) as tree:
        tree.add(ChildSpec(name="head.1", role="worker", stage="head", command=(...)))
        while (status := tree.look()) is None: ...

It is over when all drivers are done, or when it cannot go on: a child dies again and again, or cannot begin with what
it was given (exit code 2). Leaving the ``with`` ends drivers first, so that they settle what is under way while there
are workers to answer, then whole nodes, then workers, then seeds: with SIGTERM, and with SIGKILL after `grace_s`.

Signals go to a child's own process id, never to a group, and only while it has not been waited for, so that no other
process with a reused id gets them. Children end with this process (`parent_death_signal`), and run in sessions of their
own, so that Ctrl+C at the terminal reaches this process alone, which then ends its children in order.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

logger = logging.getLogger(__name__)

Role = Literal["seed", "worker", "driver", "whole node"]
ChildStatus = Literal["running", "pausing", "done", "dead"]
"""``pausing``: it died and is restarted soon; ``dead``: it died and is not."""

_USAGE_EXIT = 2  # Exit code for options or files that cannot be used: a restart would not help.
_CLEAN_EXITS = (0, *(code for it in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) for code in (128 + it, -it)))
"""Exit codes of a process that was asked to end and did so in order."""
_TAIL_BYTES = 8192
_LIFE, _REASON = "--- ", "trainer: "
"""First characters of a log's line at the start of each life, and of that in which our processes say why they end."""
_TICK_S = 0.05
_KILL_WAIT_S = 10.0
_EMPTY_STAGE_S = 10.0
_SAY_S = 10.0
_SHUTDOWN_WORK: dict[Role, str] = {
    "driver": "settle what is under way",
    "whole node": "finish its step or round, and save",
    "worker": "answer what is under way, save and hand over",
    "seed": "end",
}
"""In the order in which they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run."""

    name: str
    role: Role
    command: tuple[str, ...]
    stage: str = ""  # Of a worker.
    api_url: str = ""
    ends_last: bool = False  # Whether it ends after the others of its role, which need it to end in order.


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What happens when a child dies that was not asked to end."""

    enabled: bool = True
    first_pause_s: float = 1.0  # Before the restart; doubles with each death until a life has lasted `steady_s`.
    max_pause_s: float = 30.0
    steady_s: float = 60.0
    max_failures: int = 5  # Deaths in a row, without a steady life between them, after which the child is given up.


@dataclass(eq=False)
class Child:
    """A process over all its lives, whose output is appended to a file."""

    spec: ChildSpec
    log_path: Path
    policy: RestartPolicy
    status: ChildStatus = "pausing"
    num_restarts: int = 0
    exit_code: int | None = None  # Of its last life; negative: the signal that ended it.
    failed_to_end: bool = False  # It was asked to end and failed: it may not have saved its work.
    was_killed: bool = False  # By `kill`.
    _process: subprocess.Popen[bytes] | None = None
    _started_s: float = 0.0
    _restart_due_s: float = 0.0
    _num_failures: int = 0

    @property
    def pid(self) -> int | None:
        """Process id of the current life; None between lives."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Begins a life; raises `OSError` if the process cannot be started, or its log not be written."""
        with self.log_path.open("ab") as log:
            line = f"{_LIFE}{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(self.spec.command)}\n"
            log.write(line.encode("utf-8", "backslashreplace"))
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer.run.swarm.parent_death_signal", str(os.getpid()), *self.spec.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self._started_s = time.monotonic()
        self.status = "running"

    def look(self, now_s: float) -> str:
        """Notices a death, and restarts the process when that is due; returns what happened as text, or nothing."""
        if self.status == "pausing" and now_s >= self._restart_due_s:
            self.num_restarts += 1
            self.start()
            return f"{self.spec.name} is started again (restart {self.num_restarts})"
        code = self._process.poll() if self.status == "running" and self._process is not None else None
        return "" if code is None else self._died(code, now_s)

    def kill(self) -> None:
        """Sends SIGKILL; the child is not restarted."""
        if self.send(signal.SIGKILL):
            self.was_killed = True

    def has_ended(self) -> bool:
        """Whether it has no process any more; a child that was asked to end counts as done."""
        if self._process is None:
            return True
        code = self._process.poll()
        if code is None:
            return False
        self.exit_code, self._process = code, None
        self.status, self.failed_to_end = "done", code not in _CLEAN_EXITS
        return True

    def last_words(self) -> str:
        """Why its last life ended, in one line: the reason it printed, else the last line it printed."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError as error:
            return f"its log cannot be read: {error.strerror or error}"
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith(_LIFE):
                lines.clear()
            elif line.strip():
                lines.append(line.strip())
        reasons = [line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)]
        return (reasons or lines or ["it printed nothing"])[-1]

    def send(self, number: signal.Signals) -> bool:
        """Signals the process if it is alive, and returns whether it is; the child is not restarted."""
        if self.status == "pausing":
            self.status = "dead"
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def _died(self, code: int, now_s: float) -> str:
        self.exit_code, self._process = code, None
        name = self.spec.name
        if code == 0 and self.spec.role in ("driver", "whole node"):  # It has made its steps.
            self.status = "done"
            return f"{name} is done"
        if now_s - self._started_s >= self.policy.steady_s:
            self._num_failures = 0
        self._num_failures += 1
        if code == _USAGE_EXIT:  # The tree ends for this and quotes the reason.
            self.status = "dead"
            return f"{name} cannot begin ({_exit_text(code)}); see {self.log_path}"
        text = f"{name} ended ({_exit_text(code)}{f': {self.last_words()}' if code > 0 else ''})"
        if not self.policy.enabled or self._num_failures >= self.policy.max_failures:
            self.status = "dead"
            return f"{text} and is not started again; see {self.log_path}"
        pause_s = min(self.policy.first_pause_s * 2 ** (self._num_failures - 1), self.policy.max_pause_s)
        self.status, self._restart_due_s = "pausing", now_s + pause_s
        return f"{text}; started again in {pause_s:g} s; see {self.log_path}"


def _exit_text(code: int) -> str:
    """How a process ended, by `subprocess`'s return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Why a tree is over."""

    exit_code: int  # 0 done, 1 something failed, 2 options that make no sense.
    reason: str


@dataclass(eq=False)
class ProcessTree:
    """The children and what is done about them; for one thread.

    Their output goes to ``NAME.log`` in ``folder``. ``tell`` is told what happens, a line at a time; ``asked`` says
    whether somebody asked for the end: a second request while it is ending is answered with a line.
    """

    folder: Path
    policy: RestartPolicy
    tell: Callable[[str], None] = logger.info
    grace_s: float = 60.0
    asked: Callable[[], bool] = lambda: False
    children: list[Child] = field(default_factory=list)
    _request_is_answered: bool = False
    _last_said_s: float = 0.0
    _empty_since_s: dict[str, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def add(self, spec: ChildSpec) -> Child:
        """Starts one more child; raises `OSError` if it cannot be started, or its log not be written."""
        child = Child(spec, self.folder / f"{spec.name}.log", self.policy)
        self.children.append(child)
        child.start()
        return child

    def of(self, role: Role) -> list[Child]:
        """The children of a role."""
        return [child for child in self.children if child.spec.role == role]

    def look(self) -> ExitStatus | None:
        """Restarts the children that are due; returns why the tree is over, or None."""
        now_s = time.monotonic()
        for child in self.children:
            event = child.look(now_s)
            if event:
                self.tell(event)
        return self._status(now_s)

    def end(self) -> None:
        """Ends all children, role by role; a `KeyboardInterrupt` meanwhile kills those that are left."""
        self._request_is_answered = self.asked()
        try:
            for role in _SHUTDOWN_WORK:
                children = self.of(role)
                self._end([child for child in children if not child.spec.ends_last])
                self._end([child for child in children if child.spec.ends_last])
        except BaseException as error:
            left = _living(self.children)
            if left:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else "an error while ending"
                self.tell(f"{why}: killing {_names(left)}; their unsaved work is lost, checkpoints stay whole")
            self._kill(left)
            raise

    def _end(self, children: Sequence[Child]) -> None:
        for child in children:
            child.send(signal.SIGTERM)
        began_s = self._last_said_s = time.monotonic()
        if not _wait(children, self.grace_s, lambda: self._report_waiting(children, began_s)):
            slow = _living(children)
            self.tell(f"{_names(slow)}: not ended {self.grace_s:g} s after SIGTERM; killed")
            self._kill(slow)

    def _report_waiting(self, children: Sequence[Child], began_s: float) -> None:
        """Says which children the end waits for: now and then, and at once when the end is requested again."""
        now_s = time.monotonic()
        if now_s - self._last_said_s >= _SAY_S:
            self._last_said_s = now_s
            slow = _living(children)
            if slow:
                work, left_s = _SHUTDOWN_WORK[slow[0].spec.role], max(0.0, began_s + self.grace_s - now_s)
                self.tell(f"waiting for {_names(slow)} to {work}; killed in {left_s:.0f} s otherwise")
        if not self._request_is_answered and self.asked():
            self._request_is_answered = True
            left = _names(_living(self.children))
            self.tell(f"ending already, waiting for {left}; Ctrl+C again kills what is left")

    def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            child.kill()
        if not _wait(children, _KILL_WAIT_S):  # The kernel holds it: a disk or driver that hangs.
            left = [f"{child.spec.name} ({child.pid})" for child in _living(children)]
            self.tell(f"{', '.join(left)}: not gone {_KILL_WAIT_S:g} s after SIGKILL; left to the kernel")

    def _status(self, now_s: float) -> ExitStatus | None:
        dead = [child for child in self.children if child.status == "dead"]
        for child in dead:
            if child.exit_code == _USAGE_EXIT:
                return ExitStatus(_USAGE_EXIT, f"{child.spec.name}: {child.last_words()}")
        drivers, workers = self.of("driver"), self.of("worker")
        if drivers and all(driver.status in ("done", "dead") for driver in drivers):
            lost = [driver for driver in drivers if driver.status == "dead"]
            return ExitStatus(1, _death_text(lost[0])) if lost else ExitStatus(0, "all drivers are done")
        if dead and self.policy.enabled:
            return ExitStatus(1, _death_text(dead[0]))
        # All workers of a stage have been dead for a while; before that, drivers may be ending too.
        alive = {child.spec.stage for child in workers if child.status in ("running", "pausing")}
        for stage in {child.spec.stage for child in workers}:
            if stage in alive:
                self._empty_since_s.pop(stage, None)
            elif now_s - self._empty_since_s.setdefault(stage, now_s) > _EMPTY_STAGE_S:
                return ExitStatus(1, f"no worker of stage {stage} is left")
        return None


def _death_text(child: Child) -> str:
    how = _exit_text(child.exit_code) if child.exit_code is not None else "not started"
    return f"{child.spec.name} cannot be kept alive ({how}): {child.last_words()}; all of it is in {child.log_path}"


def _living(children: Sequence[Child]) -> list[Child]:
    return [child for child in children if not child.has_ended()]


def _names(children: Sequence[Child]) -> str:
    return ", ".join(child.spec.name for child in children)


def _wait(children: Sequence[Child], timeout_s: float, tick: Callable[[], None] = lambda: None) -> bool:
    """Waits until all have ended; returns False if that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while _living(children):
        if time.monotonic() > deadline_s:
            return False
        tick()
        time.sleep(_TICK_S)
    return True
