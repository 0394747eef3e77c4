"""What happens to a swarm's workers by a seeded schedule: killed and started again, stopped, slowed ten times.

Nothing in the product knows of it: signals are all it takes. A kill is SIGKILL, and a new process under the same name
some seconds later; a stop is SIGSTOP until SIGCONT; a slow worker is stopped for nine tenths of every half second.

At most one worker of a stage is disturbed at a time, and only while the others of its stage are at work: a stage all
of whose workers die at once has lost its weights, which is another matter (`docs/swarm.md`, checkpoints). Which worker
it is therefore depends on who is there; what happens when, and for how long, on the seed alone.
"""

from __future__ import annotations

import logging
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

logger = logging.getLogger(__name__)

Kind = Literal["kill", "stop", "slow"]

KINDS: tuple[Kind, ...] = ("kill", "stop", "slow")
SLOWED = 10
_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One entry of a schedule."""

    at_s: float
    kind: Kind
    for_s: float
    """How long; killed: until it is started again."""
    choice: float
    """Which of the workers that may be it: 0 the first, just below 1 the last."""


def schedule(seed: int, duration_s: float, every_s: float = 5.0, longest_s: float = 4.0) -> tuple[Disturbance, ...]:
    """One disturbance every ``every_s``, each kind as often as the others but for the remainder.

    They last from 2 s to ``longest_s``; a killed worker is started again after 4 s at most.
    """
    rng = random.Random(seed)
    count = int(duration_s / every_s)
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    rng.shuffle(kinds)
    return tuple(
        Disturbance(
            every_s * number, kind, rng.uniform(2.0, 4.0 if kind == "kill" else max(2.0, longest_s)), rng.random()
        )
        for number, kind in enumerate(kinds)
    )


def is_at_work(log: str) -> bool:
    """Whether a worker takes micro-batches, by what it has printed since it was started last."""
    return log.rfind(" serves version ") > log.rfind("lost touch with")


class Victim(Protocol):
    """A worker's process, over all its lives."""

    @property
    def name(self) -> str:
        """Of the worker."""
        ...

    @property
    def stage(self) -> str:
        """Which it holds."""
        ...

    def is_at_work(self) -> bool:
        """Whether it takes micro-batches."""
        ...

    def send(self, number: signal.Signals) -> None:
        """A signal to the process it lives in now."""
        ...

    def kill(self) -> None:
        """SIGKILL, and nothing starts it again but `revive`."""
        ...

    def revive(self) -> None:
        """Starts it again."""
        ...


@dataclass(slots=True)
class _Suffering:
    victim: Victim
    kind: Kind
    until_s: float
    next_s: float
    """When a slow one is stopped or continued next."""
    stopped: bool = False


@dataclass(slots=True)
class Disturber:
    """Carries a schedule out; to be told the time some fifty times a second.

    Args:
        plan: the schedule.
        victims: all workers.
    """

    plan: Sequence[Disturbance]
    victims: Sequence[Victim]
    done: list[tuple[Disturbance, str]] = field(default_factory=list)
    """What was done, and to whom."""
    num_put_off: int = 0
    """Disturbances that had to wait until there was somebody whose stage could bear it."""
    _suffering: dict[str, _Suffering] = field(default_factory=dict)
    _next: int = 0
    _is_late: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be done, and nobody suffers."""
        return self._next == len(self.plan) and not self._suffering

    @property
    def dead(self) -> set[str]:
        """Names of those that are killed and not started again yet."""
        return {name for name, it in self._suffering.items() if it.kind == "kill"}

    def tick(self, now_s: float) -> None:
        """Does what is due.

        Args:
            now_s: seconds since the beginning of the schedule.
        """
        for suffering in list(self._suffering.values()):
            self._go_on(suffering, now_s)
        if self._next < len(self.plan) and now_s >= self.plan[self._next].at_s:
            self._begin(self.plan[self._next], now_s)

    def end(self) -> None:
        """Lets everybody go on and live."""
        for suffering in list(self._suffering.values()):
            self._relieve(suffering)

    def _begin(self, disturbance: Disturbance, now_s: float) -> None:
        candidates = self._candidates()
        if not candidates:
            self.num_put_off += not self._is_late
            self._is_late = True
            return
        victim = candidates[int(disturbance.choice * len(candidates))]
        self._next, self._is_late = self._next + 1, False
        self.done.append((disturbance, victim.name))
        logger.info("%s: %s for %.1f s", victim.name, disturbance.kind, disturbance.for_s)
        suffering = _Suffering(victim, disturbance.kind, now_s + disturbance.for_s, now_s)
        self._suffering[victim.name] = suffering
        if disturbance.kind == "kill":
            victim.kill()
        elif disturbance.kind == "stop":
            victim.send(signal.SIGSTOP)
            suffering.stopped = True

    def _candidates(self) -> list[Victim]:
        """Those whose stage's other workers are all at work, and who are so themselves."""
        hurt = {it.stage for it in self.victims if it.name in self._suffering or not it.is_at_work()}
        return [victim for victim in self.victims if victim.stage not in hurt]

    def _go_on(self, suffering: _Suffering, now_s: float) -> None:
        if now_s >= suffering.until_s:
            self._relieve(suffering)
        elif suffering.kind == "slow" and now_s >= suffering.next_s:
            share = 1.0 / SLOWED if suffering.stopped else 1.0 - 1.0 / SLOWED
            suffering.victim.send(signal.SIGCONT if suffering.stopped else signal.SIGSTOP)
            suffering.stopped = not suffering.stopped
            suffering.next_s = now_s + share * _PERIOD_S

    def _relieve(self, suffering: _Suffering) -> None:
        del self._suffering[suffering.victim.name]
        if suffering.kind == "kill":
            suffering.victim.revive()
        elif suffering.stopped:
            suffering.victim.send(signal.SIGCONT)
