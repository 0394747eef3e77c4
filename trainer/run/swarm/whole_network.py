"""A node that holds a whole model, among the workers of stages: its side to the others.

It has one key, one port and one announcement, and belongs to a group for each stage (`trainer.run.node.round_group`):
the stage's workers and the other whole nodes. The workers' groups see of it the stage's part alone (`seen_as_part`), as
one of them that takes no micro-batches; so coming, catching up and choosing a state are the same for all of them.

Rounds, agreements and states of two stages have nothing to do with each other. Only three things are for the node as a
whole: it begins to train when it knows a member of each stage, or has looked for some seconds; it waits, where others
have made rounds that it has no part of, for their states; and of the states that are to be had it takes all at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, Protocol

from torch import nn

from trainer.network.discovery import Announcement
from trainer.network.discovery.stage_report import PartReport
from trainer.network.rpc import Identity
from trainer.outer.diloco import SharedState
from trainer.outer.sparta import frontier_of
from trainer.run.config import RunConfig
from trainer.run.node.identity import NodeStats
from trainer.run.node.network import Listener, Network
from trainer.run.node.round_group import RoundGroup
from trainer.run.signed import SignedRun
from trainer.run.swarm.peer_view import SwarmPeers, seen_as_part
from trainer.run.swarm.shape import WHOLE, SwarmShape
from trainer.run.swarm.synchroniser import state_form

_LOOK_S: Final = 0.5
_CATCH_UP_S: Final = 120.0
_FIRST_STATE_S: Final = 120.0
"""So long a newcomer waits for others, who say that they have made rounds, to hand out their states."""
_FIT_S: Final = 60.0

Parts = Mapping[str, SharedState]
"""States by stage."""


class PartPlace(Protocol):
    """Where one part's training is; read by any thread."""

    @property
    def round_index(self) -> int:
        """Rounds committed so far."""

    @property
    def round_share(self) -> float:
        """How much of the way to the next is done, 0 to 1."""


class WholeNetwork(Network[Any]):
    """A whole node among others; its states are `Parts`.

    ``stages`` are the model's parts by stage, and ``stopping`` tells whether the node has been asked to stop.
    """

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        shape: SwarmShape,
        stages: Mapping[str, nn.Module],
        stopping: Callable[[], bool],
        run: SignedRun | None,
    ) -> None:
        rows, names = shape.model.vocab_size, shape.plan.names
        super().__init__(
            config,
            identity,
            shape.terms(WHOLE),
            lambda: rows,
            state_form(config, stages[names[0]], rows),  # None of its own: it hands out parts.
            stopping=stopping,
            stages=names,
            near=names,
            run=run,
        )
        for name in names:
            form = state_form(config, stages[name], rows)
            self.add_group(name, shape.terms(name), lambda: rows, form, seen_as_part(name, shape))
        self.places: Mapping[str, PartPlace] = {}
        """Where training is, by stage; to be set before `start`."""
        self._first_peers_s = config.swarm.join.first_peers_s
        self._peers = SwarmPeers(config, shape, lambda: self.announcements)
        self._published: dict[str, int] = {}
        self._is_joining = True

    def start(self, listener: Listener) -> None:
        """See `Network.start`; then waits for a member of each stage, and compares this node with all others."""
        super().start(listener)
        check = self._peers.fit_check(self.endpoint)
        self._loop.run(check.begin(self._stopping), _FIT_S)
        self._comparing = self._loop.spawn(check.go_on())
        deadline_s = time.monotonic() + self._first_peers_s
        while self.expects_others and time.monotonic() < deadline_s and not self._stopping():
            if all(group.alike() for group in self._groups.values()):
                return
            time.sleep(_LOOK_S)

    def group(self, part: str) -> RoundGroup[Any]:
        """See `RoundGroup.group`."""
        return self._groups[part]

    def alike(self) -> list[Announcement]:
        """Returns what the members of all groups announce, one of each."""
        return list({said.peer_id: said for group in self._groups.values() for said in group.alike()}.values())

    def note_catching_up(self) -> None:
        """See `RoundGroup.note_catching_up`; for all parts."""
        self._is_joining = True
        for group in self._groups.values():
            group.note_catching_up()

    def move_to(self, next_round: int) -> None:
        """See `RoundGroup.move_to`; each part to its own next round, the furthest of which is ``next_round``."""
        del next_round
        for name, group in self._groups.items():
            group.move_to(self.places[name].round_index)
        self._is_joining = False
        self.announce()

    def publish(self, shared: Parts, members: tuple[str, ...] = ()) -> None:
        """Hands out the parts that are others than before."""
        for name, state in shared.items():
            place = self.places[name].round_index
            if self._published.get(name) != place:
                self._published[name] = place
                self._groups[name].publish(state, members)

    def settle(self, timeout_s: float = 600.0) -> None:
        """See `RoundGroup.settle`; for all parts."""
        for group in self._groups.values():
            group.settle(timeout_s)

    def let_go(self) -> None:
        """See `RoundGroup.let_go`; for all parts."""
        for group in self._groups.values():
            group.let_go()

    def catch_up(
        self, *, wait_s: float = _CATCH_UP_S, stop: Callable[[], bool] = lambda: False, is_new: bool = False
    ) -> Parts | None:
        """Fetches the states of those parts of which most others hold another one; see `RoundGroup.catch_up`.

        A newcomer waits until the members of all stages that have made rounds hand out their state.
        """
        self.note_catching_up()
        self.settle()
        began_s = time.monotonic()
        found: dict[str, SharedState] = {}
        while not stop():
            for name, group in self._groups.items():
                if name not in found:
                    state = group.catch_up(wait_s=0.0, stop=stop, is_new=is_new)
                    found |= {} if state is None else {name: state}
            missing = [name for name in self._groups if name not in found and self._is_missed(name)]
            waited_s = time.monotonic() - began_s
            if (found and not missing) or waited_s >= (max(wait_s, _FIRST_STATE_S) if missing else wait_s):
                break
            time.sleep(_LOOK_S)
        for name in found:  # Another state, though it may be of the same round.
            self._published.pop(name, None)
        return found or None

    def _is_missed(self, stage: str) -> bool:
        """Whether the others have made rounds of a stage, and this node has no state of it but its first weights."""
        if self.places[stage].round_index:
            return False
        return frontier_of([said.stage.round_index for said in self._groups[stage].alike() if said.stage]) > 0

    def _stats(self) -> NodeStats:
        stats = super()._stats()
        status: Literal["joining", "serving"] = "joining" if self._is_joining else "serving"
        parts = tuple(
            PartReport(
                stage=name,
                status=status,
                round_index=place.round_index,
                round_position=place.round_share,
                version=stats.inner_step,
            )
            for name, place in self.places.items()
        )
        return replace(stats, parts=parts)
