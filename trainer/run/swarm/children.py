"""One child process of a tree: its output goes to a file, and it is restarted when it dies.

Signals go to the child's own process id, never to a group, and only while the child has not been waited for, so that no
other process with a reused id gets them. It ends with this process (`parent_death_signal`), and runs in a session of
its own, so that Ctrl+C at the terminal reaches this process alone, which then ends its children in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["USAGE_EXIT", "Child", "ChildSpec", "ChildStatus", "RestartPolicy", "Role", "exit_text"]

Role = Literal["seed", "worker", "driver"]
ChildStatus = Literal["running", "pausing", "done", "dead"]
"""``pausing``: it died and is restarted soon; ``dead``: it died and is not."""

USAGE_EXIT = 2
"""Exit code for options or files that cannot be used: a restart would not help."""
_CLEAN_EXITS = (0, *(code for it in (signal.SIGINT, signal.SIGTERM) for code in (128 + it, -it)))
"""Exit codes of a process that was asked to end and did so in order."""
_TAIL_BYTES = 8192
_LIFE = "--- "
"""First characters of the line that a log has at the start of each life."""
_REASON = "trainer: "
"""First characters of the line in which our processes say why they end."""


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
    """Whether it ends after the others of its role, which need it to end in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """What happens when a child dies that was not asked to end."""

    enabled: bool = True
    first_pause_s: float = 1.0
    """Before the restart; doubles with each death until a life has lasted `steady_s`."""
    max_pause_s: float = 30.0
    steady_s: float = 60.0
    max_failures: int = 5
    """Deaths in a row, without a steady life between them, after which the child is given up."""


class Child:
    """A process over all its lives.

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
        """It was asked to end and failed: it may not have saved its work."""
        self.was_killed = False
        """By `kill`."""
        self._policy = policy
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._restart_due_s = 0.0
        self._num_failures = 0

    @property
    def pid(self) -> int | None:
        """Process id of the current life; None between lives."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Begins a life.

        Raises:
            OSError: the process cannot be started, or its log not be written.
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
        self._started_s = time.monotonic()
        self.status = "running"

    def look(self, now_s: float) -> str:
        """Notices a death, and restarts the process when that is due.

        Args:
            now_s: monotonic clock.

        Returns:
            What happened, as text; empty if nothing did.
        """
        if self.status == "pausing" and now_s >= self._restart_due_s:
            self.num_restarts += 1
            self.start()
            return f"{self.spec.name} is started again (restart {self.num_restarts})"
        if self.status == "running" and self._process is not None:
            code = self._process.poll()
            if code is not None:
                return self._died(code, now_s)
        return ""

    def ask_to_end(self) -> None:
        """Sends SIGTERM; the child is not restarted."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL; the child is not restarted."""
        if self._signal(signal.SIGKILL):
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

    def _signal(self, number: signal.Signals) -> bool:
        """Signals the process if it is alive; returns whether it is."""
        if self.status == "pausing":
            self.status = "dead"
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(number)
        return True

    def _died(self, code: int, now_s: float) -> str:
        self.exit_code, self._process = code, None
        name = self.spec.name
        if code == 0 and self.spec.role == "driver":
            self.status = "done"
            return f"{name} is done"
        if now_s - self._started_s >= self._policy.steady_s:
            self._num_failures = 0
        self._num_failures += 1
        if code == USAGE_EXIT:  # The tree ends for this and quotes the reason.
            self.status = "dead"
            return f"{name} cannot begin ({exit_text(code)}); see {self.log_path}"
        text = f"{name} ended ({exit_text(code)}{f': {self.last_words()}' if code > 0 else ''})"
        if not self._policy.enabled or self._num_failures >= self._policy.max_failures:
            self.status = "dead"
            return f"{text} and is not started again; see {self.log_path}"
        pause_s = min(self._policy.first_pause_s * 2 ** (self._num_failures - 1), self._policy.max_pause_s)
        self.status, self._restart_due_s = "pausing", now_s + pause_s
        return f"{text}; started again in {pause_s:g} s; see {self.log_path}"


def exit_text(code: int) -> str:
    """How a process ended, by `subprocess`'s return code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
