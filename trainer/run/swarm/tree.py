"""A tree of processes: a swarm's seeds, workers and drivers as children of one, which watches and ends them together.

    with ProcessTree(folder, RestartPolicy(), tell=logger.info) as tree:
        tree.add(ChildSpec(name="head.1", role="worker", stage="head", command=(...)))
        while (status := tree.look()) is None: ...

It is over when all drivers are done, or when it cannot go on: a child dies again and again, or cannot begin with what
it was given (exit code 2). Leaving the ``with`` ends drivers first, so that they settle what is under way while there
are workers to answer, then workers, then seeds: with SIGTERM, and with SIGKILL after `grace_s`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer.run.swarm.children import USAGE_EXIT, Child, ChildSpec, RestartPolicy, Role, exit_text

__all__ = ["ExitStatus", "ProcessTree"]

logger = logging.getLogger(__name__)

_TICK_S = 0.05
_KILL_WAIT_S = 10.0
_EMPTY_STAGE_S = 10.0
_SAY_S = 10.0
_SHUTDOWN_WORK: dict[Role, str] = {
    "driver": "settle what is under way",
    "worker": "answer what is under way, save and hand over",
    "seed": "end",
}
_END_ORDER: tuple[Role, ...] = ("driver", "worker", "seed")


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Why a tree is over."""

    exit_code: int
    """0 done, 1 something failed, 2 options that make no sense."""
    reason: str


class ProcessTree:
    """The children and what is done about them; for one thread.

    Args:
        folder: where each child's output goes, ``NAME.log``.
        policy: what to do when one dies.
        tell: told what happens, a line at a time.
        grace_s: how long children of one role may take to end when asked to.
        asked: whether somebody asked for the end; a second request while it is ending is answered with a line.
    """

    def __init__(
        self,
        folder: Path,
        policy: RestartPolicy,
        *,
        tell: Callable[[str], None] = logger.info,
        grace_s: float = 60.0,
        asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.children: list[Child] = []
        self._folder = folder
        self._policy = policy
        self._tell = tell
        self._grace_s = grace_s
        self._asked = asked
        self._request_is_answered = False
        self._last_said_s = 0.0
        """When the end last said which children it waits for."""
        self._empty_since_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def add(self, spec: ChildSpec) -> Child:
        """Starts one more child.

        Raises:
            OSError: it cannot be started, or its log not be written.
        """
        child = Child(spec, self._folder / f"{spec.name}.log", self._policy)
        self.children.append(child)
        child.start()
        return child

    def of(self, role: Role) -> list[Child]:
        """The children of a role."""
        return [child for child in self.children if child.spec.role == role]

    def look(self) -> ExitStatus | None:
        """Restarts the children that are due; returns why the tree is over, or None.

        Raises:
            OSError: a child cannot be started.
        """
        now_s = time.monotonic()
        for child in self.children:
            event = child.look(now_s)
            if event:
                self._tell(event)
        return self._status(now_s)

    def end(self) -> None:
        """Ends all children, role by role; a `KeyboardInterrupt` meanwhile kills those that are left."""
        self._request_is_answered = self._asked()
        try:
            for role in _END_ORDER:
                children = self.of(role)
                self._end([child for child in children if not child.spec.ends_last])
                self._end([child for child in children if child.spec.ends_last])
        except BaseException as error:
            left = _living(self.children)
            if left:
                why = "interrupted" if isinstance(error, KeyboardInterrupt) else "an error while ending"
                self._tell(f"{why}: killing {_names(left)}; their unsaved work is lost, checkpoints stay whole")
            self._kill(left)
            raise

    def _end(self, children: Sequence[Child]) -> None:
        for child in children:
            child.ask_to_end()
        began_s = self._last_said_s = time.monotonic()
        if not _wait(children, self._grace_s, lambda: self._report_waiting(children, began_s)):
            slow = _living(children)
            self._tell(f"{_names(slow)}: not ended {self._grace_s:g} s after SIGTERM; killed")
            self._kill(slow)

    def _report_waiting(self, children: Sequence[Child], began_s: float) -> None:
        """Says which children the end waits for: now and then, and at once when the end is requested again."""
        now_s = time.monotonic()
        if now_s - self._last_said_s >= _SAY_S:
            self._last_said_s = now_s
            slow = _living(children)
            if slow:
                work, left_s = _SHUTDOWN_WORK[slow[0].spec.role], max(0.0, began_s + self._grace_s - now_s)
                self._tell(f"waiting for {_names(slow)} to {work}; killed in {left_s:.0f} s otherwise")
        if not self._request_is_answered and self._asked():
            self._request_is_answered = True
            left = _names(_living(self.children))
            self._tell(f"ending already, waiting for {left}; Ctrl+C again kills what is left")

    def _kill(self, children: Sequence[Child]) -> None:
        for child in children:
            child.kill()
        if not _wait(children, _KILL_WAIT_S):  # The kernel holds it: a disk or driver that hangs.
            left = [f"{child.spec.name} ({child.pid})" for child in _living(children)]
            self._tell(f"{', '.join(left)}: not gone {_KILL_WAIT_S:g} s after SIGKILL; left to the kernel")

    def _status(self, now_s: float) -> ExitStatus | None:
        dead = [child for child in self.children if child.status == "dead"]
        for child in dead:
            if child.exit_code == USAGE_EXIT:
                return ExitStatus(USAGE_EXIT, f"{child.spec.name}: {child.last_words()}")
        drivers = self.of("driver")
        if drivers and all(driver.status in ("done", "dead") for driver in drivers):
            lost = [driver for driver in drivers if driver.status == "dead"]
            return ExitStatus(1, _death_text(lost[0])) if lost else ExitStatus(0, "all drivers are done")
        if dead and self._policy.enabled:
            return ExitStatus(1, _death_text(dead[0]))
        return self._empty_stage(now_s)

    def _empty_stage(self, now_s: float) -> ExitStatus | None:
        """Ends the run when all workers of a stage have been dead for a while; drivers may be ending too."""
        workers = self.of("worker")
        alive = {child.spec.stage for child in workers if child.status in ("running", "pausing")}
        for stage in {child.spec.stage for child in workers}:
            if stage in alive:
                self._empty_since_s.pop(stage, None)
            elif now_s - self._empty_since_s.setdefault(stage, now_s) > _EMPTY_STAGE_S:
                return ExitStatus(1, f"no worker of stage {stage} is left")
        return None


def _death_text(child: Child) -> str:
    how = exit_text(child.exit_code) if child.exit_code is not None else "not started"
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
