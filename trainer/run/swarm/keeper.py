"""The keeper of the account: how a run names it, how it is found, and the account it leaves behind when it ends.

Anybody may call a node `driver-1`. So a process that strangers can join knows the keeper by its key alone, however long
it is away. A name is accepted in a private run only (`RunConfig.is_private`): the first driver that is heard of under
it is the keeper. The last account is a file beside the journal, for people and `swarm up`: what a driver answers over
HTTP is from before it settled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from trainer.errors import TrainerUsageError
from trainer.monitor.status import SwarmAccount
from trainer.network.discovery import Announcement
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_of, identity_path

__all__ = [
    "KeeperSearch",
    "check_keeper",
    "keeper_among",
    "keeper_option",
    "keeps_account",
    "ledger_folder",
    "read_last_account",
    "write_last_account",
]

logger = logging.getLogger(__name__)

_LAST_ACCOUNT = "last_account.json"
_MAX_BYTES = 8 << 20


def keeper_option(key: str) -> str:
    """The lines of a run file that name a keeper."""
    return f"swarm: {{ledger: {{keeper: {key}}}}}"


def check_keeper(config: RunConfig) -> None:
    """Refuses a keeper that is given by name in a run that strangers can join.

    Raises:
        TrainerUsageError: with what to put into the run file; for the keeper itself its key is made for that.
    """
    ledger = config.swarm.ledger
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
    """Whether the driver with this configuration and key is the keeper."""
    ledger = config.swarm.ledger
    return ledger.keeper == (key if ledger.keeper_is_key else config.node_id)


def keeper_among(config: RunConfig, drivers: Iterable[str]) -> tuple[str, str]:
    """Node id and key of the keeper among drivers that share this machine's ``state_dir``; makes a missing key.

    Args:
        config: of the run.
        drivers: their node ids.

    Raises:
        TrainerUsageError: none of them is the keeper, or its key cannot be read or made.
    """
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


class KeeperSearch:
    """Finds the keeper among the announced drivers."""

    def __init__(self, config: RunConfig) -> None:
        self._wanted = config.swarm.ledger
        self._key = ""
        self._rejected: frozenset[str] = frozenset()

    def find(self, drivers: Iterable[Announcement]) -> Announcement | None:
        """The keeper's announcement among those of this run's drivers; None: it is not announced."""
        wanted = self._wanted.keeper
        if self._wanted.keeper_is_key:
            return next((said for said in drivers if said.peer_id == wanted), None)
        found = {said.peer_id: said for said in drivers if said.node_id == wanted}
        if found and self._key not in found:
            if self._key:
                logger.warning("the account is kept under another key from now on; name the keeper by its key")
            self._key = next(iter(found))
        others = frozenset(found.keys() - {self._key})
        for key in others - self._rejected:
            logger.warning("%s (%s) calls itself %s too and is not believed", found[key].address, key[:12], wanted)
        self._rejected = others
        return found.get(self._key)


def ledger_folder(config: RunConfig) -> Path:
    """Where a run's keeper has its journal."""
    return Path(config.state_dir).expanduser() / "ledger" / config.run_id


def write_last_account(config: RunConfig, account: SwarmAccount) -> None:
    """Writes the account of a keeper that ends; a disk that is full is logged and does not change how it ends."""
    path = ledger_folder(config) / _LAST_ACCOUNT
    temporary = path.with_name(f".{_LAST_ACCOUNT}.tmp")
    try:
        temporary.write_text(account.model_dump_json(), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s: the last account could not be written: %s", path, error)


def read_last_account(config: RunConfig, since: float) -> SwarmAccount | None:
    """The account as the keeper left it; None: it has not ended in order since then.

    Args:
        config: of the run.
        since: seconds since 1970.
    """
    path = ledger_folder(config) / _LAST_ACCOUNT
    try:
        found = path.stat()
        if found.st_mtime < since or found.st_size > _MAX_BYTES:
            return None
        return SwarmAccount.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        logger.debug("%s: %s", path, error)
        return None
