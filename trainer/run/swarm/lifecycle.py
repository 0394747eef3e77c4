"""How a worker comes and goes, decided from what others report: its stage, its beginning, catching up, leaving.

`joining` and `worker_node` do what is decided here. Threads, network and clock are passed in as functions, so that
tests run every path with a clock of their own. What others announce is believed as far as a median or a majority does:
no single worker keeps another out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from trainer.checkpoint.stages.config import StagewiseConfig
from trainer.errors import CheckpointError, IncompatiblePeerError, TrainerError, TrainerUsageError
from trainer.network.discovery.stage_report import StageReport
from trainer.outer.sparta import frontier_of
from trainer.run.config.run import JoinConfig
from trainer.run.swarm.shape import stage_of

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_RETRY_S = 2.0
_LOG_EVERY_S = 60.0
_TOO_OLD = 3  # Fetched states in a row, after which it is said what is wrong.
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 16.0
_SETTLED_S = 30.0  # A worker that has served for so long without losing touch comes back without delay.
_ANSWER_LOOK_S = 0.1
_CONFIRMED = 2.0
"""Multiple of `JoinConfig.window` within which a joiner's first round is to begin."""
_MIN_SAVE_S = 5.0  # For saving, however long the rest of a shutdown has taken.
_FEW_STEPS = 4
_SMALL_SHARE = 0.01
"""Of a run's steps: micro-batches that are lost in some stages and counted in others make versions drift apart."""


def neediest_stage(names: Iterable[str], reports: Iterable[StageReport], own_number: int = 0) -> str:
    """The stage a newcomer helps most: one without workers, else the one with the lowest rate.

    A stage's rate is the sum of its workers' rates; a worker that reports none yet counts as the slowest that does, and
    joining ones are on their way to help. Of equally needy stages ``own_number`` picks one, so that newcomers that come
    together spread; two that choose the same one at the same moment are made up for by the next.
    """
    by_stage: dict[str, list[float]] = {name: [] for name in names}
    for report in reports:
        stage = stage_of(report)
        if report.status != "leaving" and stage in by_stage:
            by_stage[stage].append(report.rows_per_s)
    neediest = [name for name, rates in by_stage.items() if not rates]
    if not neediest:
        slowest = min((rate for rates in by_stage.values() for rate in rates if rate > 0), default=1.0)
        totals = {name: sum(rate or slowest for rate in rates) for name, rates in by_stage.items()}
        least = min(totals.values())
        neediest = [name for name, total in totals.items() if total <= least * (1 + 1e-9)]
    return neediest[own_number % len(neediest)]


def check_first_weights(began_from: str, path: str, others: Iterable[StageReport]) -> None:
    """Compares the model this worker began with to that of the workers that serve, or else of all that begin.

    Each reads it from its own machine, at ``path``, and announces a fingerprint of the weights, ``began_from``; empty:
    it read none, as one that goes on from a checkpoint. Raises `IncompatiblePeerError` if most began with another.
    """
    known = [report for report in others if report.began_from]
    known = [report for report in known if report.status == "serving"] or known
    differing = [report for report in known if report.began_from != began_from]
    if not began_from or not differing:
        return
    one = differing[0]
    text = (
        f"swarm.start_from: expected the model that {one.uid} began with, of fingerprint {one.began_from}, found "
        f"{path} with {began_from}; give all workers a copy of the same folder"
    )
    if 2 * len(differing) > len(known):
        raise IncompatiblePeerError(text)
    logger.warning("%s (%d of %d differ)", text, len(differing), len(known))


@dataclass(slots=True)
class StartupVersionCheck:
    """Checks whether a worker may serve first weights, given the versions the other stages announce.

    Where the other stages have stepped, and this one has neither a checkpoint here nor a worker elsewhere, first
    weights would train on among trained ones, and only the loss would tell. Such a worker waits ``grace_s`` for a peer
    with the stage's state, and then refuses to start, unless `swarm.checkpoint.begin_anew` is set. What counts is how
    much of the others' work is on disk: a stage whose only worker dies before anything is begins anew, with a warning.
    The check ends ``grace_s`` after the stage's first step in this process. The trade-off: whoever announces a worker
    that has saved much can keep others from beginning an empty stage, though nobody with a checkpoint.
    """

    stage: str
    names: Sequence[str]
    config: StagewiseConfig
    grace_s: float
    version: Callable[[], int]
    reports: Callable[[], Iterable[StageReport]]
    clock: Callable[[], float] = time.monotonic
    has_first_weights: bool = True  # To be cleared when the worker goes on from a checkpoint.
    _is_compared: bool = False
    _first_version: int | None = None
    _stepped_s: float | None = None
    _waits_since_s: float | None = None

    def may_serve(self) -> bool:
        """Whether a worker without donor may serve what it has; False: ask again. Raises if the stage is lost."""
        if not self.has_first_weights or self._is_over():
            return True
        reports = list(self.reports())
        versions = self._versions(report for report in reports if report.status != "leaving")
        own = versions[self.stage]
        if max(versions.values()) - own <= _FEW_STEPS:
            self._waits_since_s = None
            return True
        saved = max((report.saved for report in reports if stage_of(report) != self.stage), default=0)
        if saved - own > _FEW_STEPS and not self.config.begin_anew:
            return self._wait(saved, versions)
        self.has_first_weights, self._is_compared = False, True
        logger.warning(
            "%s BEGINS ANEW, with first weights, among stages that are trained (%s): there is no checkpoint of it "
            "here and no worker that serves it; what it had learned is lost",
            self.stage,
            _text(versions),
        )
        return True

    def took_up_state(self) -> None:
        """Notes that the worker has the state of others that serve its stage: it begins nothing, they have compared.

        In a run of several steps a second, the stages' announcements are steps apart.
        """
        self.has_first_weights, self._is_compared = False, True

    def compare(self) -> None:
        """Logs a warning once, when all stages serve, if their versions are far apart."""
        if self._is_compared:
            return
        self._is_compared = self._is_over()
        versions = self._versions(report for report in self.reports() if report.status == "serving")
        if self._is_compared or set(versions) < set(self.names):
            return
        self._is_compared = True
        newest = max(versions.values())
        if newest - min(versions.values()) > max(_FEW_STEPS, _SMALL_SHARE * newest):
            logger.warning(
                "the stages go on from versions that are far apart (%s), as from checkpoints of different ages; stop "
                "all workers and use python -m trainer rollback to have them begin from one moment",
                _text({name: versions[name] for name in self.names}),
            )

    def _wait(self, saved: int, versions: dict[str, int]) -> bool:
        now_s = self.clock()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
            logger.warning(
                "%s: no checkpoint of it here and no worker that serves it, while others are trained (%s); waiting "
                "%.0f s for one that has its state",
                self.stage,
                _text(versions),
                self.grace_s,
            )
        if now_s - self._waits_since_s < self.grace_s:
            return False
        raise TrainerUsageError(
            f"{self.stage}: expected a checkpoint of it in {self.config.directory}, or a worker of it, found neither "
            f"among stages that have saved up to version {saved} ({_text(versions)}); copy here what the machine that "
            "held it has, start a worker there, or set swarm.checkpoint.begin_anew to go on with first weights"
        )

    def _versions(self, reports: Iterable[StageReport]) -> dict[str, int]:
        """The highest version of each stage, this worker's own included."""
        versions = {self.stage: self.version()}
        for report in reports:
            stage = stage_of(report)
            if stage in self.names:
                versions[stage] = max(report.version, versions.get(stage, 0))
        return versions

    def _is_over(self) -> bool:
        """Whether the stage has stepped for `grace_s` in this process."""
        version = self.version()
        if self._first_version is None:
            self._first_version = version
        if self._stepped_s is None and version > self._first_version:
            self._stepped_s = self.clock()
        return self._stepped_s is not None and self.clock() - self._stepped_s >= self.grace_s


def _text(versions: dict[str, int]) -> str:
    return ", ".join(f"{stage} at version {version}" for stage, version in versions.items())


def catch_up(
    config: JoinConfig,
    *,
    others: Callable[[], Sequence[StageReport]],
    take_up: Callable[[], bool],
    may_be_first: Callable[[], bool],
    round_index: Callable[[], int],
    is_current: Callable[[], bool],
    is_over: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    max_behind: int | None = None,
) -> bool:
    """Waits until a worker that joins its stage may serve: it is current, or alone. Returns False if asked to stop.

    The others' state is taken up in the first tenth of a round (spec P-43): later a newcomer would begin with work that
    they have long done. A round that does not move for `JoinConfig.idle_s` counts as a beginning, since nobody may be
    working on it. A worker that gets no state keeps asking: none serves first weights while others have better ones.

    ``others`` that serve the stage report; ``take_up`` returns False where none of their states was to be had, or none
    did fit; ``max_behind`` is how many rounds that state may be behind (None: as configured); ``may_be_first`` decides
    where nobody serves; ``round_index`` is this worker's next; ``is_current`` tells whether it came back from a
    checkpoint of the state from which the others' round began. ``may_be_first`` and ``is_over`` may raise what ends the
    worker.
    """
    seen: tuple[int, float] | None = None
    num_too_old, seen_since_s, logged_s = 0, 0.0, -_LOG_EVERY_S
    most_behind = config.max_rounds_behind if max_behind is None else max_behind
    while not is_over():
        reports = others()
        if not reports:
            if may_be_first():
                return True
            sleep(_LOOK_S)
            continue
        if is_current():
            return True
        frontier, position = place = _round_place(reports)
        if place != seen:
            seen, seen_since_s = place, clock()
        is_beginning = position < config.window or clock() - seen_since_s >= config.idle_s
        took_up = is_beginning and take_up()
        if took_up and _round_place(others())[0] - round_index() <= most_behind:
            return True
        num_too_old += took_up
        if took_up and num_too_old == _TOO_OLD:
            logger.warning(
                "the stage's state was too old %d times once it was here: fetching it takes longer than their rounds; "
                "this worker goes on trying, and needs a faster link or longer rounds",
                num_too_old,
            )
        pause_s, wait = _LOOK_S, "their state is taken up when"
        if is_beginning:
            what = "the state that was taken up is too old by now" if took_up else "none hands out a state yet"
            pause_s, wait = _RETRY_S, f"{what}; they are asked again in {_RETRY_S:g} s, then when"
        if clock() - logged_s >= _LOG_EVERY_S:
            logged_s = clock()
            logger.info(
                "waiting for the stage's state: %s the next round of the others begins (round %d is %.0f %% through), "
                "or when it has not moved for %g s",
                wait,
                frontier,
                100 * position,
                config.idle_s,
            )
        sleep(pause_s)
    return False


def confirm_current(
    config: JoinConfig,
    *,
    others: Callable[[], Sequence[StageReport]],
    round_index: Callable[[], int],
    is_lost: Callable[[], bool],
    is_over: Callable[[], bool],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    """Waits, while a joiner follows the rounds with weight 0, until a round begins that it is in from the beginning.

    That is while the others are in the first fifth of the round that is this worker's next one (twice
    `JoinConfig.window`), or where nothing has moved for `JoinConfig.idle_s`. Returns False if the worker has lost
    touch with the others meanwhile, so that their state has to be taken up again, or is asked to stop.
    """
    seen: tuple[int, float] | None = None
    seen_since_s = clock()
    while not is_over() and not is_lost():
        reports = others()
        if not reports:
            return True
        frontier, position = place = _round_place(reports)
        if place != seen:
            seen, seen_since_s = place, clock()
        is_beginning = frontier <= round_index() and position < _CONFIRMED * config.window
        if is_beginning or clock() - seen_since_s >= config.idle_s:
            return True
        sleep(_LOOK_S)
    return False


def _round_place(others: Sequence[StageReport]) -> tuple[int, float]:
    """The others' round, and how far it is; medians, so that no single worker can keep newcomers out."""
    frontier = frontier_of([report.round_index for report in others])
    positions = [report.round_position for report in others if report.round_index == frontier]
    return frontier, median_low(positions) if positions else 0.0


def rejoin_delay_s(before_s: float, served_s: float) -> float:
    """How long a worker waits to take up the others' state again, which costs them 12 bytes a parameter.

    Nothing at first, then twice as long as ``before_s`` each time, up to 16 s, until it has served for half a minute.
    """
    return 0.0 if served_s >= _SETTLED_S else min(max(2 * before_s, _FIRST_DELAY_S), _MAX_DELAY_S)


def version_of_state(num_steps: int, versions: Collection[int]) -> int:
    """The stage's version that belongs to a state which was taken up: that of the worker that made it.

    It differs from the optimizer steps in the state by those that the stage made without that worker. So of the
    versions that its holders announce, the nearest counts, which no number of announcements makes worse.
    """
    return min(versions, key=lambda version: (abs(version - num_steps), version), default=num_steps)


def is_ahead(version: int, others: Collection[StageReport]) -> bool:
    """Whether a worker that comes back with a checkpoint of this version keeps it beside those that serve.

    It does if its version is nearer to the newest of the others than to the oldest, and at most half of the stage,
    itself counted, is behind it: one worker's word overrules no majority.
    """
    if not others:
        return False
    versions = [report.version for report in others]
    num_behind = sum(other < version for other in versions)
    return version - min(versions) > max(versions) - version and 2 * num_behind <= len(versions) + 1


def shut_down_gracefully(
    *,
    leave_s: float,
    num_unanswered: Callable[[], int],
    refuse: Callable[[], None],
    save: Callable[[float], None],
    share: Callable[[float], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Answers what is under way, counts nothing more, steps and saves, and shares the work in a last round.

    Whatever was acknowledged is in the state that is saved. The worker saves first because it can do that alone. All of
    it may take ``leave_s``, half of that answers; ``save`` and ``share`` are told how many seconds they have. A state
    that cannot be saved is shared if possible, and raises `CheckpointError` then.
    """

    def wait_for_answers(until_s: float) -> None:
        while num_unanswered() and clock() < until_s:
            sleep(_ANSWER_LOOK_S)

    leave_by_s = clock() + leave_s
    wait_for_answers(leave_by_s - leave_s / 2)
    refuse()
    unsaved: CheckpointError | None = None
    try:
        save(max(_MIN_SAVE_S, leave_by_s - clock()))
    except CheckpointError as error:
        unsaved = error
    try:
        share(max(0.0, leave_by_s - clock()))
    except TrainerError as error:
        logger.warning("leaving without a last round: %s", error)
    wait_for_answers(leave_by_s)
    if unsaved is not None:
        raise unsaved
