"""`PeerCollective`: the collective among strangers, as the training thread sees it.

The rest of this package lives in the event loop of the node's endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeAlias

from trainer.aggregation import RuleConfig, Weighing
from trainer.aggregation.config import Averaging
from trainer.collective.config import CollectiveConfig, Directory, RoundChanges, RoundSettings
from trainer.collective.member import RoundMember
from trainer.collective.messages import Terms
from trainer.collective.service import RoundService
from trainer.compression.vectors import codec_named
from trainer.errors import RoundFailedError, RoundLeftError, StateBehindError
from trainer.network.rpc import CallEndpoint
from trainer.outer.engine.collective import Contribution, FollowingPhase, RoundResult

logger = logging.getLogger(__name__)

_Round: TypeAlias = Callable[[], Coroutine[Any, Any, RoundResult]]

_SLACK_S = 30.0
_LOOK_EVERY_S = 0.5
_LEAVE_AFTER_S = 10.0


class PeerCollective:
    """Rounds with the other nodes of the run.

    Args:
        endpoint: not started yet, so that its answers can be registered.
        loop: its event loop, running in another thread.
        vocabulary_rows: returns the most rows of vocabulary this node could have now; called before each round.
        stopping: returns whether the node has been asked to stop; a round then has ten more seconds.
        changes: of the run, by its owner; None: there are none.
        weighing: what a member's claimed work weighs.
        averaging: of sparse contributions.
        cycle: rounds after which the same parameters come again.
    """

    def __init__(
        self,
        endpoint: CallEndpoint,
        loop: asyncio.AbstractEventLoop,
        run_id: str,
        terms: Terms,
        rule: RuleConfig,
        config: CollectiveConfig,
        directory: Directory,
        vocabulary_rows: Callable[[], int],
        stopping: Callable[[], bool] = lambda: False,
        changes: RoundChanges | None = None,
        weighing: Weighing = "root",
        averaging: Averaging = "replicas",
        cycle: int = 1,
    ) -> None:
        self._loop = loop
        self._vocabulary_rows = vocabulary_rows
        self._stopping = stopping
        self._service = RoundService(
            RoundSettings(
                run_id=run_id,
                terms=terms,
                rule=rule,
                codec=codec_named(config.compression),
                config=config,
                endpoint=endpoint,
                directory=directory,
                changes=changes,
                weighing=weighing,
                averaging=averaging,
                cycle=cycle,
            )
        )
        self.agreed_vocabulary_rows = 0
        """Rows of vocabulary that the members of the last round all can have; 0 before the first."""
        self.behind = False
        """Whether the last round failed because the others hold another state, which has not been taken up since."""
        self.keeps_work = False
        """Whether this node's work can be in no result of the round that went on without it, and so counts later."""
        self._attended: tuple[RoundMember, Future[RoundResult]] | None = None

    def reduce(self, contribution: Contribution) -> RoundResult:
        """Takes part in one round; see `trainer.outer.engine.collective.Collective`."""
        member = RoundMember(self._service, contribution, self._vocabulary_rows())
        return self._take_part(member, member.run, contribution.round_index)

    def reduce_in_phases(self, contribution: Contribution, following: FollowingPhase) -> RoundResult:
        """Takes part in a round of two phases; see `trainer.outer.engine.collective.PhasedCollective`."""
        member = RoundMember(self._service, contribution, self._vocabulary_rows())
        return self._take_part(member, partial(member.run_in_phases, following), contribution.round_index)

    @property
    def closes_early(self) -> bool:
        """See `trainer.outer.engine.collective.AttendedCollective`; so are the next three."""
        return bool(self._service.settings.config.quorum)

    def open_attendance(self, *, is_open: bool) -> None:
        """A round that this node attends and has not acknowledged is left at once when attendance ends."""
        if is_open:
            self._service.attendance.open()
            return
        self._service.attendance.close()
        attended = self._attended
        if attended is not None and not attended[0].is_agreed:
            attended[1].cancel()

    def wait_to_attend(self, timeout_s: float) -> int | None:
        """Waits in the calling thread."""
        return self._service.attendance.wait(timeout_s)

    def attend(self, contribution: Contribution) -> RoundResult:
        """As `reduce`; raises RoundLeftError where attendance ended before the round was agreed on."""
        member = RoundMember(self._service, contribution, self._vocabulary_rows())
        return self._take_part(member, member.run, contribution.round_index, attends=True)

    def _take_part(
        self, member: RoundMember, go_through: _Round, round_index: int, *, attends: bool = False
    ) -> RoundResult:
        future = asyncio.run_coroutine_threadsafe(self._run(go_through, round_index), self._loop)
        self._attended = (member, future) if attends else None
        if not attends:
            self._service.attendance.comes_for(member.timeout_s)
        try:
            if attends and not self._service.attendance.is_open:
                future.cancel()
            result = future.result(member.timeout_s + _SLACK_S)
        except CancelledError as error:
            raise RoundLeftError(f"round {round_index}: left before it was agreed on") from error
        except TimeoutError as error:
            future.cancel()
            raise RoundFailedError(f"round {round_index}: the node's event loop does not answer") from error
        finally:
            self._attended = None
            if not attends:
                self._service.attendance.comes_for(0.0)
            self.keeps_work = self.closes_early and (attends or member.agreement is None)
        if member.agreement is not None:
            self.agreed_vocabulary_rows = member.agreement.vocabulary_rows
        return result

    def requested(self) -> bool:
        """Returns whether others wait for this node."""
        return self._service.invited(time.monotonic())

    def move_to(self, next_round: int) -> None:
        """Notes that the node has taken a state and trains towards this round; -1 while it has none."""
        self.behind = False
        self._loop.call_soon_threadsafe(self._service.move_to, next_round)

    def catch_up(self) -> None:
        """Notes that the node is fetching the others' state, until `move_to`."""
        self._loop.call_soon_threadsafe(self._service.catch_up)

    def close(self) -> None:
        """Ends all waiting for this node."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._service.close)

    async def _run(self, go_through: _Round, round_index: int) -> RoundResult:
        self._service.move_to(round_index)
        self.behind, next_round = False, round_index
        try:
            result = await self._until_stopped(go_through)
            next_round = round_index + 1
            return result
        except StateBehindError:
            self.behind, next_round = True, -1
            raise
        except RoundFailedError:
            raise
        except Exception as error:
            # Nothing others send may end this node: an unforeseen error costs a round.
            logger.exception("round %d", round_index)
            raise RoundFailedError(f"round {round_index}: {type(error).__name__}: {error}") from error
        finally:
            if next_round != round_index and self._service.next_round == round_index:
                self._service.move_to(next_round)  # Unless the node has taken up another state meanwhile.
                if self.behind:  # Said from now on: the training thread hears of it some moments later.
                    self._service.catch_up()

    async def _until_stopped(self, go_through: _Round) -> RoundResult:
        """Goes through the round; leaves it some time after the node was asked to stop, which harms no other round."""
        running = asyncio.create_task(go_through())
        asked_at_s: float | None = None
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_LOOK_EVERY_S)
                if asked_at_s is None and self._stopping():
                    asked_at_s = time.monotonic()
                if asked_at_s is not None and time.monotonic() > asked_at_s + _LEAVE_AFTER_S and not running.done():
                    raise RoundLeftError("left the round, since this node is to stop")
            return running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
