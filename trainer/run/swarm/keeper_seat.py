"""From a run file to a driver's place in the succession of keepers: which journal, which members, what a keeper opens.

A driver's copy of a replicated journal is in ``state_dir/ledger/RUN/replica/NODE``. Members are found by their
announcements; in a private run by node id, so that a machine that was replaced, and has another key, is a member again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from trainer.network.rpc import Endpoint, Peer, PeerId
from trainer.pipeline.ledger import KeeperSeat, LedgerService
from trainer.pipeline.ledger.config import is_key
from trainer.pipeline.ledger.election import ReplicatedSite
from trainer.pipeline.ledger.group_commit import AccountJournal
from trainer.pipeline.ledger.records import Grown, LedgerSnapshot, Opened, Record
from trainer.pipeline.ledger.replica import Replica
from trainer.pipeline.ledger.replica_service import Members, ReplicaService
from trainer.pipeline.ledger.store_journal import StoreSite
from trainer.pipeline.ledger.store_place import StorePlace
from trainer.pipeline.ledger.succession import JournalSite
from trainer.run.config import RunConfig
from trainer.run.swarm.keeper import ledger_folder
from trainer.run.swarm.peer_view import DriverPeerView
from trainer.run.swarm.shape import as_usage_errors

logger = logging.getLogger(__name__)


def open_seat(
    config: RunConfig,
    endpoint: Endpoint,
    peers: DriverPeerView,
    is_away: Callable[[], bool],
    make: Callable[[AccountJournal, list[Record]], LedgerService],
) -> KeeperSeat:
    """Returns a driver's seat, at an endpoint that is not started yet, for an account that is not local.

    ``is_away``: whether the keeper does not answer this driver; ``make``: see `KeeperSeat`. Raises TrainerUsageError
    if its copy of the journal cannot be opened, or the journal's address makes no sense.
    """
    ledger = config.swarm.ledger
    with as_usage_errors():
        site: JournalSite
        if ledger.journal == "replicated":
            members = _members(config, endpoint, peers)
            service = None
            if members.own is not None:
                replica = Replica.open(ledger_folder(config) / "replica" / config.node_id)
                service = ReplicaService(endpoint, replica, members, ledger.takeover_s)
            site = ReplicatedSite(endpoint, service, members, ledger.takeover_s)
        else:
            place = StorePlace.of(ledger.journal, config.run_id)
            may_keep = not ledger.keepers or _own_name(config, endpoint.peer_id) is not None
            site = StoreSite(place, endpoint.peer_id, ledger.takeover_s, may_keep=may_keep, is_away=is_away)
    return KeeperSeat(endpoint, site, ledger.takeover_s, make)


def num_shards_in(records: Iterable[Record]) -> tuple[int, ...]:
    """How many shards each lane has, by the records of an account; empty: they do not say."""
    found: tuple[int, ...] = ()
    for record in records:
        if isinstance(record, Opened | Grown):
            found = record.shards
        elif isinstance(record, LedgerSnapshot):
            found = tuple(lane.next_num_shards for lane in record.lanes)
    return found


def _own_name(config: RunConfig, key: PeerId) -> str | None:
    """What the run file calls this driver among the keepers; None: it is none of them."""
    names = config.swarm.ledger.keepers
    if key in names:
        return key
    return config.node_id if config.node_id in names and not is_key(config.node_id) else None


def _members(config: RunConfig, endpoint: Endpoint, peers: DriverPeerView) -> Members:
    names = config.swarm.ledger.keepers
    own_name = _own_name(config, endpoint.peer_id)

    def peer(name: str) -> Peer | None:
        said = peers.driver_called(name)
        return None if said is None else said.peer()

    own = None if own_name is None else names.index(own_name)
    return Members(names, own, peer, peers.keeper_named)
