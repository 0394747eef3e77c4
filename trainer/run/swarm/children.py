"""One child process of a tree: its output goes to a file, it is restarted when it dies, signalled by its own number.

A signal is sent to the child only, and only while it has not been waited for, so never to a stranger that got its
number, and never to a group. The child does not outlive this process (`parent_death_signal`). It is in a session of its
own, so that a Ctrl+C at the terminal reaches this process alone, which then ends its children in order. `free_ports`
chooses ports before the children that are to listen on them are started.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.errors import TrainerError

__all__ = ["Child", "ChildSpec", "ChildStatus", "RestartPolicy", "Role", "free_ports", "said_of"]

logger = logging.getLogger(__name__)

_FIRST, _LAST = 12_000, 32_000
"""Below those that kernels hand out to whoever connects (32,768 on, Linux): those may be gone a moment later."""
_TRIES = 200


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many ports nobody listens on, all different.

    Nothing keeps others from taking one before it is used; whoever then cannot listen says so and ends the swarm.

    Raises:
        TrainerError: there are too few.
    """
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(range(_FIRST, _LAST), _TRIES + count):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((host, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        raise TrainerError(f"expected {count} free ports at {host} between {_FIRST} and {_LAST}, found {len(ports)}")
    return ports


Role = Literal["seed", "worker", "driver"]
ChildStatus = Literal["running", "pausing", "done", "dead"]
"""``pausing``: it died and is started again soon; ``dead``: it died and is not."""

USAGE_EXIT = 2
"""Of options that make no sense, or files they name: they will make none the next time either."""
_IN_ORDER = (0, *(sign for it in (signal.SIGINT, signal.SIGTERM) for sign in (128 + it, -it)))
"""How a process ends that was asked to."""
_TAIL_BYTES = 8192
_LIFE = "--- "
"""How the line begins that a log has at the start of each life."""
_REASON = "trainer: "
"""How the line begins in which a process of ours says why it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run."""

    name: str
    """Its log is ``NAME.log``."""
    role: Role
    command: tuple[str, ...]
    stage: str = ""
    """Of a worker."""
    api_url: str = ""
    """Where it answers over HTTP, if it does."""
    ends_last: bool = False
    """Of its role: the others need it to end in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What happens when a child dies that nobody told to."""

    enabled: bool = True
    first_pause_s: float = 1.0
    """Before it is started again; doubles with each death until one life lasted `steady_s`."""
    max_pause_s: float = 30.0
    steady_s: float = 60.0
    max_failures: int = 5
    """So many deaths in a row, none of the lives steady: it is given up."""


class Child:
    """A process and its lives.

    Args:
        spec: what to run.
        log_path: file its output is appended to.
        policy: what to do when it dies.
    """

    def __init__(self, spec: ChildSpec, log_path: Path, policy: RestartPolicy) -> None:
        self.spec = spec
        self.log_path = log_path
        self.status: ChildStatus = "pausing"
        self.num_restarts = 0
        self.exit_code: int | None = None
        """Of its last life; negative: the signal that ended it."""
        self.failed_to_end = False
        """Asked to end, it did so with an error: it may not have saved what it had."""
        self.was_killed = False
        """By `kill`."""
        self._policy = policy
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self._due_s = 0.0
        self._num_failures = 0

    @property
    def pid(self) -> int | None:
        """Of the life it lives now."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Begins a life.

        Raises:
            OSError: it cannot be started, or its log not be written.
        """
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
        self._began_s = time.monotonic()
        self.status = "running"

    def look(self, now_s: float) -> str:
        """Notices that it has died, and starts it again where that is due.

        Args:
            now_s: monotonic clock.

        Returns:
            What happened, for people; empty if nothing did.
        """
        if self.status == "pausing" and now_s >= self._due_s:
            self.num_restarts += 1
            self.start()
            return f"{self.spec.name} is started again (the {_ordinal(self.num_restarts)} time)"
        if self.status == "running" and self._process is not None:
            code = self._process.poll()
            if code is not None:
                return self._ended(code, now_s)
        return ""

    def ask_to_end(self) -> None:
        """SIGTERM; it is not started again."""
        if self.status == "pausing":
            self.status = "dead"
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL; it is not started again."""
        if self.status == "pausing":
            self.status = "dead"
        if self._process is not None and self._process.poll() is None:
            self.was_killed = True
            self._process.kill()

    def has_ended(self) -> bool:
        """Whether no process of it is there; one that was asked to end counts as done."""
        if self._process is None:
            return True
        code = self._process.poll()
        if code is None:
            return False
        self.exit_code, self._process = code, None
        self.status, self.failed_to_end = "done", code not in _IN_ORDER
        return True

    def last_words(self) -> str:
        """Why its last life ended, in one line: as it said itself, else the last that it said of anything."""
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
        return (reasons or lines or ["it said nothing"])[-1]

    def _ended(self, code: int, now_s: float) -> str:
        self.exit_code, self._process = code, None
        name = self.spec.name
        if code == 0 and self.spec.role == "driver":
            self.status = "done"
            return f"{name} is done"
        if now_s - self._began_s >= self._policy.steady_s:
            self._num_failures = 0
        self._num_failures += 1
        if code == USAGE_EXIT:  # Why, whoever ends all for that says.
            self.status = "dead"
            return f"{name} cannot begin ({said_of(code)}); see {self.log_path}"
        said = f"{name} ended ({said_of(code)}{f': {self.last_words()}' if code > 0 else ''})"
        if not self._policy.enabled or self._num_failures >= self._policy.max_failures:
            self.status = "dead"
            return f"{said} and is not started again; see {self.log_path}"
        pause_s = min(self._policy.first_pause_s * 2 ** (self._num_failures - 1), self._policy.max_pause_s)
        self.status, self._due_s = "pausing", now_s + pause_s
        return f"{said}; started again in {pause_s:g} s; see {self.log_path}"


def said_of(code: int) -> str:
    """How a process ended, by `subprocess`'s return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
