"""`PartsTrainer`: one whole model of which each part has rounds of its own, with whoever holds that part.

Among swarms of stages (heterogeneous replicas, arXiv 2601.02360) a node that holds all layers is a replica of every
stage: in a stage's rounds its vector is its model cut at the stage's parameters, in their order. So there is a
`DiLoCoTrainer` for each part, with its own anchor, momentum, round number and work that waits for a round.

What is guaranteed: a part's round commits on all of that part or on none of it. What is not: that the rounds of two
parts commit together. A node whose head took part in round 7 and whose tail missed it trains on a head of 8 and a tail
of 7 until it has taken up the tail's state, as the workers of two stages in a pipeline do; the parts share no values,
so there is nothing to undo.

The training thread waits for all rounds that are due at once, each in a thread of its own; meanwhile the other parts
answer whoever waits for them. One after the other, two whole nodes that began with different parts would wait for each
other until the rounds' deadlines. A step without a round costs 3 µs a part (on a busy core).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Final

from trainer.errors import CheckpointMismatchError
from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.diloco.state import SharedState
from trainer.outer.diloco.trainer import DiLoCoTrainer
from trainer.outer.engine.daemon_call import start_daemon
from trainer.outer.engine.strategy import OuterResult

_VERSION: Final = 1
_LOOK_S: Final = 0.2
"""Between two looks at whether others wait for a part, while another part is in a round."""

_Call = Callable[[DiLoCoTrainer], OuterResult | None]


class PartsTrainer:
    """Keeps the parts of one node's model in step with the others'; ``trainers`` by part. For the training thread.

    No two parts may have a parameter in common, and no two trainers a collective.
    """

    def __init__(self, trainers: Mapping[str, DiLoCoTrainer]) -> None:
        self.trainers = dict(trainers)

    def configure(self, config: DiLoCoConfig) -> None:
        """See `DiLoCoTrainer.configure`."""
        for trainer in self.trainers.values():
            trainer.configure(config)

    @property
    def round_index(self) -> int:
        """Rounds committed of the part that is furthest."""
        return max(trainer.round_index for trainer in self.trainers.values())

    @property
    def outer_step(self) -> int:
        """Outer steps that every part has made."""
        return min(trainer.outer_step for trainer in self.trainers.values())

    @property
    def inner_step(self) -> int:
        """Inner steps since the last round of every part was tried."""
        return min(trainer.inner_step for trainer in self.trainers.values())

    @property
    def num_inner_steps(self) -> int:
        """Inner steps in the rounds so far, of the part that has fewest: where a late joiner's schedule begins."""
        return min(trainer.num_inner_steps for trainer in self.trainers.values())

    @property
    def unshared(self) -> tuple[int, int]:
        """Inner steps, and their batches, since the last committed round of the part that has most."""
        return max(trainer.unshared for trainer in self.trainers.values())

    def state_digest(self) -> str:
        """Returns a digest over those of all parts' states."""
        digests = (f"{name} {trainer.state_digest()}" for name, trainer in self.trainers.items())
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def after_inner_step(self, num_batches: int = 1) -> tuple[OuterResult, ...]:
        """Counts an inner step for all parts, and goes on with the rounds of those where it is time.

        Returns the rounds that ended, in the order of the parts. Raises what `DiLoCoTrainer.after_inner_step` does,
        once no part is in a round any more.
        """
        for trainer in self.trainers.values():
            trainer.count_step(num_batches)
        return self._together([name for name, trainer in self.trainers.items() if trainer.is_due], DiLoCoTrainer.go_on)

    def drain(self) -> tuple[OuterResult, ...]:
        """Waits for the rounds under way, and merges them now."""
        return self._together(list(self.trainers), DiLoCoTrainer.drain)

    def shared_state(self) -> dict[str, SharedState]:
        """Returns what late joiners adopt, by part."""
        return {name: trainer.shared_state() for name, trainer in self.trainers.items()}

    def adopt(self, shared: Mapping[str, SharedState]) -> None:
        """Replaces the states of some parts by copies of other members'; those parts' local work is dropped.

        Raises:
            IncompatiblePeerError: one does not belong to its part. Those before it were adopted.
        """
        for name, state in shared.items():
            self.trainers[name].adopt(state)

    def state_to_write(self) -> dict[str, Any]:
        """Returns everything to go on from here, without a wait; see `DiLoCoTrainer.state_to_write`."""
        return {"version": _VERSION, "parts": {name: each.state_to_write() for name, each in self.trainers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state; the caller restores the model's parameters.

        Raises:
            CheckpointMismatchError: another version, other parts, or another model.
        """
        parts = state.get("parts")
        if state.get("version") != _VERSION or not isinstance(parts, Mapping) or parts.keys() != self.trainers.keys():
            found = ", ".join(map(str, parts)) if isinstance(parts, Mapping) else "none"
            raise CheckpointMismatchError(
                f"expected the parts {', '.join(self.trainers)}, of version {_VERSION}, found {found[:80]} "
                f"of version {str(state.get('version'))[:20]}; a node of another cut, or of a run without whole nodes "
                "among stages, has other checkpoints"
            )
        for name, trainer in self.trainers.items():
            trainer.load_state_dict(parts[name])

    def _together(self, names: Iterable[str], call: _Call) -> tuple[OuterResult, ...]:
        """Calls each of these parts' trainers in a thread of its own; the others answer whoever waits for them.

        Each part is in one round at most: members that are much faster would otherwise keep this node from its steps.
        """
        running = {name: self._started(name, call) for name in names}
        idle = [name for name in self.trainers if name not in running]
        results: list[OuterResult] = []
        errors: list[BaseException] = []
        while running:
            wait(running.values(), _LOOK_S, FIRST_COMPLETED)
            for name in [name for name, future in running.items() if future.done()]:
                future = running.pop(name)
                error = future.exception()
                if error is not None:
                    errors.append(error)
                elif (result := future.result()) is not None:
                    results.append(replace(result, part=name))
            awaited = [name for name in idle if running and not errors and self.trainers[name].is_awaited]
            running |= {name: self._started(name, DiLoCoTrainer.answer_others) for name in awaited}
            idle = [name for name in idle if name not in awaited]
        if errors:
            raise errors[0]
        order = list(self.trainers)
        return tuple(sorted(results, key=lambda result: order.index(result.part)))

    def _started(self, name: str, call: _Call) -> Future[OuterResult | None]:
        trainer = self.trainers[name]
        return start_daemon(lambda: call(trainer), f"rounds-of-{name}")
