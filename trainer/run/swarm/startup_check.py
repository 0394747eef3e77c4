"""Checks whether a starting worker may initialise its weights, given the versions the other stages announce.

Where the other stages have stepped, and a stage has neither a checkpoint here nor a worker elsewhere, first weights
would train on among trained ones, and only the loss would tell. Such a worker waits for a peer that has the stage's
state, and then refuses to start, unless `swarm.checkpoint.begin_anew` is set.

The check compares how much of the others' work is on disk (`StageReport.saved`), not how far they are: until the first
multiple of `interval_s` nothing is, and a stage whose only worker dies then begins anew, with a warning. Differences of
a few steps are ignored: stages step by themselves, and announcements are seconds old. Peers are discovered one after
another, so the check goes on until the stage has stepped for a while. Announcements are believed: an attacker that
announces a worker that has saved much can keep others from beginning an empty stage, though nobody with a checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from trainer.checkpoint.stages.config import StagewiseConfig
from trainer.errors import TrainerUsageError
from trainer.network.discovery.stage_report import StageReport
from trainer.run.swarm.shape import stage_of

__all__ = ["StartupVersionCheck"]

logger = logging.getLogger(__name__)

_FEW_STEPS = 4
_SMALL_SHARE = 0.01
"""Of a run's steps: micro-batches that are lost in some stages and counted in others make versions drift apart."""


class StartupVersionCheck:
    """The check of one worker; used by the thread that decides about joining and leaving.

    Args:
        stage: the worker's.
        names: of all stages, head first.
        config: of checkpoints.
        grace_s: how long to wait for a worker that has the stage's state; and for how long after the stage's first step
            in this process the check goes on.
        version: the worker's own.
        reports: what the run's other workers announce.
        clock: seconds.
    """

    def __init__(
        self,
        stage: str,
        names: Sequence[str],
        config: StagewiseConfig,
        grace_s: float,
        *,
        version: Callable[[], int],
        reports: Callable[[], Iterable[StageReport]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.has_first_weights = True
        """To be cleared when the worker goes on from a checkpoint or the others' state."""
        self._stage = stage
        self._names = names
        self._config = config
        self._grace_s = grace_s
        self._version = version
        self._reports = reports
        self._clock = clock
        self._is_compared = False
        self._first_version: int | None = None
        self._stepped_s: float | None = None
        self._waits_since_s: float | None = None

    def may_serve(self) -> bool:
        """Whether a worker that has nobody to take a state from may serve what it has; False: ask again.

        Raises:
            TrainerUsageError: its stage's work is lost, or lies elsewhere.
        """
        if not self.has_first_weights or self._is_over():
            return True
        reports = list(self._reports())
        versions = self._versions(report for report in reports if report.status != "leaving")
        own = versions[self._stage]
        if max(versions.values()) - own <= _FEW_STEPS:
            self._waits_since_s = None
            return True
        saved = max((report.saved for report in reports if stage_of(report) != self._stage), default=0)
        if saved - own > _FEW_STEPS and not self._config.begin_anew:
            return self._wait(saved, versions)
        self.has_first_weights, self._is_compared = False, True
        logger.warning(
            "%s BEGINS ANEW, with first weights, among stages that are trained (%s): there is no checkpoint of it "
            "here and no worker that serves it; what it had learned is lost",
            self._stage,
            _text(versions),
        )
        return True

    def compare(self) -> None:
        """Logs a warning once, when all stages serve, if their versions are far apart."""
        if self._is_compared:
            return
        self._is_compared = self._is_over()
        versions = self._versions(report for report in self._reports() if report.status == "serving")
        if self._is_compared or set(versions) < set(self._names):
            return
        self._is_compared = True
        newest = max(versions.values())
        if newest - min(versions.values()) > max(_FEW_STEPS, _SMALL_SHARE * newest):
            logger.warning(
                "the stages go on from versions that are far apart (%s), as from checkpoints of different ages; stop "
                "all workers and use python -m trainer rollback to have them begin from one moment",
                _text({name: versions[name] for name in self._names}),
            )

    def _wait(self, saved: int, versions: dict[str, int]) -> bool:
        now_s = self._clock()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
            logger.warning(
                "%s: no checkpoint of it here and no worker that serves it, while others are trained (%s); waiting "
                "%.0f s for one that has its state",
                self._stage,
                _text(versions),
                self._grace_s,
            )
        if now_s - self._waits_since_s < self._grace_s:
            return False
        raise TrainerUsageError(
            f"{self._stage}: expected a checkpoint of it in {self._config.directory}, or a worker of it, found neither "
            f"among stages that have saved up to version {saved} ({_text(versions)}); copy here what the machine that "
            "held it has, start a worker there, or set swarm.checkpoint.begin_anew to go on with first weights"
        )

    def _versions(self, reports: Iterable[StageReport]) -> dict[str, int]:
        """The highest version of each stage, this worker's own included."""
        versions = {self._stage: self._version()}
        for report in reports:
            stage = stage_of(report)
            if stage in self._names:
                versions[stage] = max(report.version, versions.get(stage, 0))
        return versions

    def _is_over(self) -> bool:
        """Whether the stage has stepped for `grace_s` in this process."""
        version = self._version()
        if self._first_version is None:
            self._first_version = version
        if self._stepped_s is None and version > self._first_version:
            self._stepped_s = self._clock()
        return self._stepped_s is not None and self._clock() - self._stepped_s >= self._grace_s


def _text(versions: dict[str, int]) -> str:
    return ", ".join(f"{stage} at version {version}" for stage, version in versions.items())
