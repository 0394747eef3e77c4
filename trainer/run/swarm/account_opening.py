"""Checks, before a keeper leases anything, that its account is that of what the workers were trained on.

A keeper without its journal, or with an old backup of it, would lease data again that workers were trained on, and the
account would not tell. So nothing is leased before a worker of each stage is known, and a keeper does not begin if the
workers are ahead of its account, unless `swarm.ledger.begin_anew` is set.

An empty account fits workers at version 0 alone. Else the journal notes every few seconds the stages' version and what
was settled by then; the stages can be ahead of that by what was leased since, and by a few steps more, since workers
that leave or have nothing to do step with less than a whole step's tokens. Announcements are believed: for a stage,
what most of its workers announce; for an account that has begun, what most stages are at, so that one liar does not
keep a keeper from coming back. The trade-off: a backup that is a few steps old passes for the journal itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median_low

from trainer.checkpoint.stages.contents import peek
from trainer.checkpoint.stages.naming import named_files
from trainer.errors import CheckpointError, TrainerUsageError
from trainer.network.discovery.stage_report import StageReport
from trainer.pipeline.ledger.ledger import Ledger
from trainer.run.config import RunConfig
from trainer.run.swarm.shape import stage_of, target_tokens_of

__all__ = ["AccountOpening"]

logger = logging.getLogger(__name__)

_FEW_STEPS = 16
_SMALL_SHARE = 0.01
"""Of a run's steps: those made with less than a whole step's tokens while no keeper was there to note them."""
_LOG_EVERY_S = 60.0


class AccountOpening:
    """Holds back a keeper's leases until the account is checked; for one event loop. ``journal`` is for messages."""

    def __init__(self, config: RunConfig, journal: Path, ledger: Ledger, stages: Sequence[str]) -> None:
        self._config = config
        self._journal = journal
        self._ledger = ledger
        self._stages = stages
        self._logged_s = time.monotonic()
        ledger.leases_nothing = True

    def check_checkpoints(self) -> None:
        """Refuses an empty account beside checkpoints of trained stages, before their workers are known.

        Raises:
            TrainerUsageError: the account is empty, and this machine has such checkpoints.
        """
        if self._config.swarm.ledger.begin_anew or self._highest() != 0:
            return
        directory = self._config.swarm.checkpoint.directory
        for named in reversed(list(named_files(directory, self._config.run_id))):
            try:
                version = peek(named).version
            except CheckpointError:
                continue
            if version:
                raise self._refusal(f"{named.path} is of step {version}")

    def is_over(self, reports: Iterable[StageReport]) -> bool:
        """Whether leases are given, after reports of all workers of this run file; False: not all stages are known yet.

        Raises:
            TrainerUsageError: workers were trained on what is not in the account.
        """
        known = list(reports)
        version, highest = self.version(known), self._highest()
        ahead = max(_reached(known).values(), default=0) if highest == 0 else version
        allowed = None if not highest else highest + max(_FEW_STEPS, int(_SMALL_SHARE * highest))
        is_ahead = highest is not None and ahead is not None and ahead > (allowed or 0)
        if is_ahead and not self._config.swarm.ledger.begin_anew:
            raise self._refusal(", ".join(sorted(f"{it.uid} is at version {it.version}" for it in known)[:8]))
        if version is None:
            self._log_missing(known)
            return False
        if is_ahead:
            logger.warning("the account BEGINS ANEW beside workers at version %s; rows are trained on again", ahead)
        self._ledger.leases_nothing = False
        return True

    def version(self, reports: Iterable[StageReport]) -> int | None:
        """The version that most stages have reached; None: a stage has no worker."""
        reached = _reached(reports)
        return median_low(reached.values()) if reached.keys() >= set(self._stages) else None

    def _highest(self) -> int | None:
        return self._ledger.state.highest_version(target_tokens_of(self._config))

    def _log_missing(self, reports: Iterable[StageReport]) -> None:
        if time.monotonic() < self._logged_s + _LOG_EVERY_S:
            return
        self._logged_s = time.monotonic()
        there = {stage_of(report) for report in reports}
        missing = ", ".join(name for name in self._stages if name not in there)
        logger.info("nothing is leased yet: no worker of %s has been heard of", missing)

    def _refusal(self, found: str) -> TrainerUsageError:
        highest = self._highest()
        known = f"one that ends at version {highest} at most" if highest else "none"
        return TrainerUsageError(
            f"the account of run {self._config.run_id}: expected the journal of what its workers were trained on in "
            f"{self._journal}, found {known}, while {found}; put the run's journal there, start the keeper on the "
            "machine that has it, or set swarm.ledger.begin_anew=true to lease the data again from there on"
        )


def _reached(reports: Iterable[StageReport]) -> dict[str, int]:
    """The version that most workers of each stage have reached at least: no single worker decides for a stage."""
    versions: dict[str, list[int]] = {}
    for report in reports:
        versions.setdefault(stage_of(report), []).append(report.version)
    return {stage: median_low(found) for stage, found in versions.items()}
