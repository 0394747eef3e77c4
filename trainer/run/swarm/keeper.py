"""Who keeps the account: a key, or, where no stranger can come, a name.

Anybody may call a node `driver-1`. So whoever can be joined by strangers knows the keeper by its key alone, and waits
for that one however long it is away. A name is believed in a private run only (`RunConfig.is_private`): of the first
that is heard of under it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from trainer.errors import TrainerUsageError
from trainer.network.discovery import Announcement
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_of, identity_path

__all__ = ["KeeperSearch", "check_keeper", "keeper_among", "keeper_option", "keeps_account"]

logger = logging.getLogger(__name__)


def keeper_option(key: str) -> str:
    """What names a keeper in a run file."""
    return f"swarm: {{ledger: {{keeper: {key}}}}}"


def check_keeper(config: RunConfig) -> None:
    """Refuses a keeper that is named where strangers can come.

    The keeper's own key is made, so that the message can tell it.

    Raises:
        TrainerUsageError: with what to put into the run file.
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
    """Whether this driver is the keeper.

    Args:
        config: of the driver.
        key: its own.
    """
    ledger = config.swarm.ledger
    return ledger.keeper == (key if ledger.keeper_is_key else config.node_id)


def keeper_among(config: RunConfig, drivers: Iterable[str]) -> tuple[str, str]:
    """The keeper among drivers that share this machine's ``state_dir``, whose key is made where there is none yet.

    Args:
        config: of the run.
        drivers: their node ids.

    Returns:
        Its node id and its key.

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
    """Finds the keeper among those that are announced.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._wanted = config.swarm.ledger
        self._key = self._wanted.keeper if self._wanted.keeper_is_key else ""
        self._disbelieved: frozenset[str] = frozenset()

    def find(self, drivers: Iterable[Announcement]) -> Announcement | None:
        """The keeper's announcement; None: it has none.

        Args:
            drivers: those of this run file that are announced now.
        """
        wanted = self._wanted.keeper
        if self._wanted.keeper_is_key:
            return next((said for said in drivers if said.peer_id == wanted), None)
        found = {said.peer_id: said for said in drivers if said.node_id == wanted}
        if found and self._key not in found:
            if self._key:
                logger.warning("the account is kept under another key from now on; name the keeper by its key")
            self._key = next(iter(found))
        others = frozenset(found.keys() - {self._key})
        for key in others - self._disbelieved:
            logger.warning("%s (%s) calls itself %s too and is not believed", found[key].address, key[:12], wanted)
        self._disbelieved = others
        return found.get(self._key)
