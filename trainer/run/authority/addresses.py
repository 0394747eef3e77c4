"""Signs addresses of the run's bucket for members, which then need no key for it.

    member's signature, credential not expired, not revoked → names it may read or write → how many, how large → signed

Who may do what follows from names alone, but for snapshots: a member writes its own contributions, state records and
wish, once, agreements and the run's description where there are none, and the snapshot that it is this member's turn to
write by an agreement in the bucket. It removes its own wish. It reads and lists what belongs to a run.

What a member can do with addresses is bounded: the size of each object is signed with it, the bytes and the number of
objects of an hour have budgets by key, and an address lives a quarter of an hour. The trade-off: a member that is
revoked goes on with the addresses that it has for so long; what it puts meanwhile, others leave out.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from genesis.store.opening import open_store
from genesis.store.s3_presigning import BucketRequest, S3Presigner, SignedAddress
from trainer.bucket_rounds.config import MAX_SLICES, BucketConfig
from trainer.bucket_rounds.documents import (
    MAX_AGREEMENT_BYTES,
    MAX_HEADER_BYTES,
    MAX_RECORD_BYTES,
)
from trainer.bucket_rounds.history import History
from trainer.bucket_rounds.object_names import RUN_KEY, ObjectName, is_listed_prefix, parse_name
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.rules import RoundRules
from trainer.bucket_rounds.snapshots import PART_CHUNKS
from trainer.collective.planning import coordinator_order
from trainer.errors import RefusedError, TrainerError, TrainerUsageError
from trainer.network.rpc.messages import PeerId, Reason
from trainer.network.rpc.token_buckets import TokenBuckets, remember
from trainer.network.transfer.descriptor import CHUNK_BYTES, MAX_DESCRIPTOR_BYTES
from trainer.run.authority.messages import WantedAddress

logger = logging.getLogger(__name__)

_MAX_RUN_BYTES: Final = 1 << 20
_MAX_PAGES_BYTES: Final = 64 << 20  # Digests of 2 TiB of chunks.
_MOST_NAMES: Final = {"contribution": 4, "agreement": 16, "slice": 4 * MAX_SLICES, "result": MAX_SLICES}
"""Of one member to one round: contributions of its earlier lives, attempts, slices of those and what they come to."""
_ROUNDS_KEPT: Final = 1 << 15  # Of all members together.
_HOUR_S: Final = 3600.0
_TURNS_KEPT: Final = 64
_TURN_LIFE_S: Final = 600.0
_LOOK_READS: Final = 16.0
"""Of a member's budget, for each look at whose turn it is; that there is no agreement yet is not remembered, or one who
asked too early would have the next one refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressConfig:
    """What members may do with signed addresses."""

    life_s: int = 900
    """Seconds for which an address is good."""
    max_contribution_bytes: int = 1 << 30
    """Of one contribution; 125 million parameters have 0.5 GB in fp32."""
    hourly_bytes: float = 64e9
    """Bytes that one member may put in an hour, snapshots included."""
    hourly_objects: float = 10_000.0
    """Objects that one member may put in an hour."""
    reads_at_once: float = 8192.0
    """Addresses for reading that one member gets at once, and then `reads_per_s`."""
    reads_per_s: float = 64.0

    def __post_init__(self) -> None:
        if not 30 <= self.life_s <= 86_400:
            raise TrainerUsageError(f"--address-life-s: expected 30 s to a day, found {self.life_s}")
        if not self.hourly_bytes > 0:
            raise TrainerUsageError(f"--member-gb: expected a number above 0, found {self.hourly_bytes / 1e9:g}")
        for name in ("max_contribution_bytes", "hourly_objects"):
            if not getattr(self, name) > 0:
                raise TrainerUsageError(f"{name}: expected a number above 0, found {getattr(self, name)}")


class BucketAddresses:
    """Signs addresses of one run's bucket; safe from many threads, and its calls block."""

    def __init__(
        self, url: str, run_name: str, config: AddressConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.place = Place(open_store(url))
        self._presigner = S3Presigner(url)
        self._run_name = run_name
        self._config = config
        self._clock = clock
        self._guard = threading.Lock()
        self._bytes = TokenBuckets(config.hourly_bytes, config.hourly_bytes / _HOUR_S, clock)
        self._objects = TokenBuckets(config.hourly_objects, config.hourly_objects / _HOUR_S, clock)
        self._named: OrderedDict[tuple[PeerId, str, int], set[str]] = OrderedDict()  # By member, kind and round.
        self._reads = TokenBuckets(config.reads_at_once, config.reads_per_s, clock)
        self._asked_at: OrderedDict[PeerId, float] = OrderedDict()
        self._turns: OrderedDict[int, tuple[float, frozenset[PeerId]]] = OrderedDict()

    @property
    def url(self) -> str:
        """The bucket."""
        return self._presigner.url

    def check(self) -> None:
        """Raises TrainerUsageError if the bucket does not honour conditional writes, or cannot be written."""
        self.place.check()

    def take_new(self, peer_id: PeerId, sent_at: float) -> None:
        """Raises RefusedError (``replayed``) for a request that is not newer than the last of its sender."""
        with self._guard:
            if sent_at <= self._asked_at.get(peer_id, 0.0):
                raise RefusedError(Reason.REPLAYED, "expected a new request for addresses, found one that came before")
            remember(self._asked_at, peer_id, sent_at, 1 << 16)

    def sign(self, peer_id: PeerId, wanted: Sequence[WantedAddress]) -> list[SignedAddress]:
        """Returns an address for each request of a member that was found to be one.

        Raises:
            RefusedError: ``name`` for what it may not ask for, ``rate`` beyond its budgets.
            GenesisError: the bucket, or its credentials, cannot be read.
        """
        for each in wanted:
            self._check_permitted(peer_id, each)
        for each in wanted:
            self._pay(peer_id, each)
        requests = [BucketRequest(each.kind, each.key, each.after, each.size_bytes, each.if_absent) for each in wanted]
        return [self._presigner.sign(request, self._config.life_s) for request in requests]

    def close(self) -> None:
        """Gives back connections."""
        self.place.close()
        self._presigner.close()

    def _check_permitted(self, peer_id: PeerId, wanted: WantedAddress) -> None:
        why = refusal_of(peer_id, wanted, self._config)
        name = parse_name(wanted.key)
        if not why and wanted.kind == "put" and name is not None and name.kind == "snapshot":
            is_turn = peer_id in self._writers(peer_id, name.round_index)
            why = "" if is_turn else "by no agreement is it this member's turn to store the state after that round"
        if why:
            raise RefusedError("name", f"{wanted.kind} {wanted.key[:160]}: {why}")

    def _pay(self, peer_id: PeerId, wanted: WantedAddress) -> None:
        with self._guard:
            if wanted.kind in ("get", "list"):
                is_paid = self._reads.take(peer_id)
            else:
                is_paid = self._objects.take(peer_id) and self._take_named(peer_id, wanted)
                is_paid = is_paid and self._bytes.take(peer_id, float(wanted.size_bytes))
        if not is_paid:
            raise RefusedError(Reason.RATE, f"{wanted.kind} {wanted.key[:160]}: expected fewer or smaller objects")

    def _take_named(self, peer_id: PeerId, wanted: WantedAddress) -> bool:
        """Counts the names that a member puts to a round; one that it asks for again counts once."""
        name = parse_name(wanted.key)
        most = _MOST_NAMES.get(name.kind) if name is not None and wanted.kind == "put" else None
        if name is None or most is None:
            return True
        place = (peer_id, name.kind, name.round_index)
        names = self._named.get(place, set()) | {wanted.key}
        if len(names) > most:
            return False
        remember(self._named, place, names, _ROUNDS_KEPT)
        return True

    def _writers(self, peer_id: PeerId, round_index: int) -> frozenset[PeerId]:
        """Returns who may store the state after a round, by the agreement that counts; others lie beside it."""
        with self._guard:
            found_at, writers = self._turns.get(round_index, (float("-inf"), frozenset()))
            if self._clock() - found_at < _TURN_LIFE_S:
                return writers
            if not self._reads.take(peer_id, _LOOK_READS):
                raise RefusedError(Reason.RATE, "expected fewer snapshots")
        described = described_in(self.place, self._run_name)
        agreement = None if described is None else History(self.place, described[0]).standing(round_index)
        if agreement is None:
            return frozenset()
        found = frozenset(coordinator_order(self._run_name, round_index, agreement.keys)[: int(agreement.has_snapshot)])
        with self._guard:
            remember(self._turns, round_index, (self._clock(), found), _TURNS_KEPT)
        return found


def refusal_of(peer_id: PeerId, wanted: WantedAddress, config: AddressConfig) -> str:
    """Returns why a member may not make a request, by its name and size alone; empty: it may."""
    if wanted.kind == "list":
        if not is_listed_prefix(wanted.key):
            return "expected the beginning of names of a run"
        return "" if not wanted.after or wanted.after.startswith(wanted.key) else "expected a name of the same list"
    name = parse_name(wanted.key)
    if name is None:
        return "expected the name of an object of a run"
    if wanted.after:
        return "expected no place in a list"
    if wanted.kind == "get":
        return ""
    if name.member and name.member != peer_id:
        return "expected this member's own object"
    if wanted.kind == "delete":
        is_own_word = name.kind in ("wish", "departure")
        return "" if is_own_word else "expected its wish or departure, since nothing else is removed by members"
    if wanted.if_absent == (name.kind == "wish"):
        return "expected a put where there is none; a wish replaces the one before"
    most = _most_bytes(name, config)
    return "" if wanted.size_bytes <= most else f"expected at most {most} bytes, found {wanted.size_bytes}"


def _most_bytes(name: ObjectName, config: AddressConfig) -> int:
    if name.kind in ("slice", "result"):
        return config.max_contribution_bytes
    if name.kind == "contribution":
        return config.max_contribution_bytes + MAX_HEADER_BYTES + 1
    if name.kind == "snapshot":
        parts = {"descriptor": MAX_DESCRIPTOR_BYTES, "pages": _MAX_PAGES_BYTES}
        return parts.get(name.part, PART_CHUNKS * CHUNK_BYTES)
    return {"agreement": MAX_AGREEMENT_BYTES, "run": _MAX_RUN_BYTES}.get(name.kind, MAX_RECORD_BYTES)


def described_in(place: Place, run_name: str) -> tuple[RoundRules, BucketConfig] | None:
    """Returns a run's rules and what of its options removes old rounds, as its description in the bucket has them.

    None: there is no description. Raises TrainerError where it is of another run, or none.
    """
    body = place.get_bounded(RUN_KEY, _MAX_RUN_BYTES)
    if body is None:
        return None
    try:
        found: dict[str, Any] = json.loads(body)
        given = {field.name: found["rounds"][field.name] for field in fields(RoundRules)}
        rules = RoundRules(**given | {"members": tuple(map(str, given["members"]))})
        if found["run_id"] != run_name or rules.run_id != run_name:
            raise ValueError(f"it is of run {found['run_id']!r}")
        kept = {**asdict(BucketConfig()), **found["rounds"]}
        config = BucketConfig(
            members=rules.members,
            num_slices=int(kept["num_slices"]),
            snapshot_rounds=int(kept["snapshot_rounds"]),
            keep_rounds=int(kept["keep_rounds"]),
        )
        return rules, config
    except (ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"expected the description of run {run_name} at {RUN_KEY} in {place.url}: {error}") from None
