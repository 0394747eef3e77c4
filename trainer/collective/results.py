"""What a member holds of a round's result: decoded values, and the digests it votes with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from trainer.collective.arithmetic import Arithmetic, Payload
from trainer.collective.messages import Task, TaskDigest
from trainer.errors import CodecError

__all__ = ["HeldResults", "TaskResult"]


class TaskResult:
    """The parts of one task as they come, in order."""

    def __init__(self, task: Task, arithmetic: Arithmetic, values: torch.Tensor) -> None:
        self._task = task
        self._arithmetic = arithmetic
        self._values = values
        self._next_part = task.first_part
        self._sha256 = hashlib.sha256()

    @property
    def complete(self) -> bool:
        """Whether all parts are there."""
        return self._next_part == self._task.last_part

    @property
    def digest(self) -> str | None:
        """SHA-256 of the encoded parts one after the other; None as long as one lacks."""
        return self._sha256.hexdigest() if self.complete else None

    def add(self, part: int, payload: Payload) -> None:
        """Takes the next part.

        Raises:
            CodecError: it is not the next part, does not decode, or is not finite.
        """
        if part != self._next_part or self.complete:
            raise CodecError(f"expected part {self._next_part} of task {self._task.key}, found {part}")
        self._arithmetic.decode_result(part, payload, self._values)
        self._sha256.update(payload)
        self._next_part += 1


class HeldResults:
    """All tasks of a round; a task that was lost and given to another is begun anew."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.values = torch.zeros(arithmetic.agreement.num_values)
        self._arithmetic = arithmetic
        self._tasks: dict[str, TaskResult] = {}

    def begin(self, task: Task) -> TaskResult:
        """An empty place for a task's parts."""
        self._tasks[task.key] = TaskResult(task, self._arithmetic, self.values)
        return self._tasks[task.key]

    def digest(self, key: str) -> str | None:
        """The digest of a task's result, if it is whole."""
        return self._tasks[key].digest if key in self._tasks else None

    def holds(self, digests: Iterable[TaskDigest]) -> bool:
        """Whether what was decided is what is here."""
        return all(entry.digest is not None and self.digest(entry.key) == entry.digest for entry in digests)
