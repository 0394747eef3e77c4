"""The keeper of the account: how a run names it, when it may lease, and the account it leaves behind when it ends.

Anybody may call a node `driver-1`. So a process that strangers can join knows the keeper by its key alone; a name is
accepted in a private run only (`RunConfig.is_private`). The last account is a file beside the journal, for people and
`swarm up`: what a driver answers over HTTP is from before it settled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low

from pydantic import ValidationError

from trainer.checkpoint.stages.contents import peek
from trainer.checkpoint.stages.naming import named_files
from trainer.errors import CheckpointError, TrainerUsageError
from trainer.monitor.status import SwarmAccount
from trainer.network.discovery.stage_report import StageReport
from trainer.pipeline.ledger.config import is_key
from trainer.pipeline.ledger.ledger import Ledger
from trainer.pipeline.ledger.records import WorkerSeen
from trainer.run.config import RunConfig
from trainer.run.config.run import keeper_option
from trainer.run.node.identity import identity_of, identity_path
from trainer.run.swarm.shape import stage_of, target_tokens_of

logger = logging.getLogger(__name__)

_LAST_ACCOUNT = "last_account.json"
_MAX_BYTES = 8 << 20
_FEW_STEPS = 16
_SMALL_SHARE = 0.01
"""Of a run's steps: those made with less than a whole step's tokens while no keeper was there to note them."""
_LOG_EVERY_S = 60.0


def check_keeper(config: RunConfig) -> None:
    """Refuses, with what to do, a keeper that is given by name in a run that strangers can join."""
    ledger = config.swarm.ledger
    if ledger.is_shared:
        if not config.is_private and not (ledger.keepers and all(map(is_key, ledger.keepers))):
            raise TrainerUsageError(
                "swarm.ledger.keepers: expected the keys of the drivers that may keep the account, since strangers can "
                f"join this run, found {', '.join(ledger.keepers) or 'none'}; run 'python -m trainer identity' where "
                "each is to run, and put the keys that it prints into the run file of all workers and drivers"
            )
        return
    if ledger.keeper_is_key or config.is_private:
        return
    if config.pipeline == "swarm" and ledger.keeper == config.node_id:
        key = identity_of(config).peer_id
        how = f"put the key of {config.node_id} into the run file of all workers and drivers: {keeper_option(key)}"
    else:
        how = (
            f"run 'python -m trainer identity --node-id {ledger.keeper}' where that driver is to run, and put the key "
            "that it prints into the run file of all workers and drivers"
        )
    raise TrainerUsageError(
        f"swarm.ledger.keeper: expected a key, since anybody may take the name {ledger.keeper!r} in a run that "
        f"strangers can join; {how}. In a cluster where no stranger can come, set discovery.allow_private=true instead"
    )


def keeps_account(config: RunConfig, key: str) -> bool:
    """Whether the driver with this configuration and key is the keeper of an account that is local."""
    ledger = config.swarm.ledger
    return ledger.keeper == (key if ledger.keeper_is_key else config.node_id)


def workers_seen(reports: Iterable[StageReport], served: Collection[str]) -> tuple[WorkerSeen, ...]:
    """Returns what the account notes of the workers that are announced: of those that serve, or ever did.

    A worker that joins becomes another incarnation when it takes up its stage's state. The one that ends has counted
    nothing; noted, it would look like a worker that died, and all that dead drivers hold would be lost as unclear.

    Args:
        reports: of all workers as announced now.
        served: incarnations that this returned before.
    """
    return tuple(
        WorkerSeen(
            stage=stage_of(report),
            incarnation=report.incarnation,
            shared_through=report.shared_through,
            resumed=report.resumed or None,
            resumed_through=report.resumed_through,
        )
        for report in reports
        if report.status != "joining" or report.incarnation in served
    )


def keeper_among(config: RunConfig, drivers: Iterable[str]) -> tuple[str, str]:
    """Node id and key of the keeper among drivers, by their ids, of this ``state_dir``; makes a missing key."""
    wanted, names = config.swarm.ledger, list(drivers)
    for name in names:
        own = replace(config, node_id=name)
        if wanted.keeper == name or (wanted.keeper_is_key and identity_path(own).exists()):
            key = identity_of(own).peer_id
            if wanted.keeper in (name, key):
                return name, key
    raise TrainerUsageError(
        f"swarm.ledger.keeper: expected one of the drivers of this machine ({', '.join(names)}) or its key, found "
        f"{wanted.keeper}; with --set swarm.ledger.keeper= it is driver-1"
    )


class AccountOpening:
    """Holds back a keeper's leases until its account is that of what the workers were trained on; for one event loop.

    A keeper without its journal, or with an old backup of it, would lease data again that workers were trained on, and
    the account would not tell. So a keeper does not begin if the workers are ahead, unless `swarm.ledger.begin_anew` is
    set. An empty account fits workers at version 0 alone. Else stages can be ahead of what the journal notes by what
    was leased since, and by a few steps, since workers that leave step with less than a whole step's tokens. Of a stage
    the median announcement counts, and of the stages the median: one liar keeps no keeper from coming back. The
    trade-off: a backup that is a few steps old passes for the journal itself.
    """

    def __init__(self, config: RunConfig, journal: str, ledger: Ledger, stages: Sequence[str]) -> None:
        self._config = config
        self._journal = journal
        self._ledger = ledger
        self._stages = stages
        self._logged_s = time.monotonic()
        ledger.leases_nothing = True

    def check_checkpoints(self) -> None:
        """Refuses an empty account beside checkpoints of trained stages, before their workers are known."""
        if self._config.swarm.ledger.begin_anew or self._highest() != 0:
            return
        for named in reversed(list(named_files(self._config.swarm.checkpoint.directory, self._config.run_id))):
            try:
                version = peek(named).version
            except CheckpointError:
                continue
            if version:
                raise self._refusal(f"{named.path} is of step {version}")

    def is_over(self, reports: Iterable[StageReport]) -> bool:
        """Whether leases are given, after these reports; False: some stage is unknown. Raises if workers are ahead."""
        known = list(reports)
        version, highest = self.version(known), self._highest()
        ahead = max(_reached(known).values(), default=0) if highest == 0 else version
        allowed = None if not highest else highest + max(_FEW_STEPS, int(_SMALL_SHARE * highest))
        is_ahead = highest is not None and ahead is not None and ahead > (allowed or 0)
        if is_ahead and not self._config.swarm.ledger.begin_anew:
            raise self._refusal(", ".join(sorted(f"{it.uid} is at version {it.version}" for it in known)[:8]))
        if version is None:
            if time.monotonic() >= self._logged_s + _LOG_EVERY_S:
                self._logged_s = time.monotonic()
                missing = ", ".join(name for name in self._stages if name not in _reached(known))
                logger.info("nothing is leased yet: no worker of %s has been heard of", missing)
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


def ledger_folder(config: RunConfig) -> Path:
    """Where a run's keeper has its journal."""
    return Path(config.state_dir).expanduser() / "ledger" / config.run_id


def write_last_account(config: RunConfig, account: SwarmAccount) -> None:
    """Writes the account of a keeper that ends; a disk that is full is logged and does not change how it ends."""
    path = ledger_folder(config) / _LAST_ACCOUNT
    temporary = path.with_name(f".{_LAST_ACCOUNT}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # With a journal elsewhere nothing else has made it.
        temporary.write_text(account.model_dump_json(), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s: the last account could not be written: %s", path, error)


def read_last_account(config: RunConfig, since: float) -> SwarmAccount | None:
    """The account as the keeper left it; None: it has not ended in order since then (seconds since 1970)."""
    path = ledger_folder(config) / _LAST_ACCOUNT
    try:
        found = path.stat()
        if found.st_mtime < since or found.st_size > _MAX_BYTES:
            return None
        return SwarmAccount.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        logger.debug("%s: %s", path, error)
        return None
