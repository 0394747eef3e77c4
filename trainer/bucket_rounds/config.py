"""Options of rounds through an object store, and what stores ask for requests and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from trainer.errors import TrainerUsageError
from trainer.network.rpc.messages import is_peer_id

PriceList = Literal["s3", "r2", "b2", "none"]
Access = Literal["own", "signed"]

MAX_MEMBERS: Final = 256
"""Of a round: as many vectors as the rules take (`trainer.aggregation.second_moments.MAX_MEMBERS`)."""

MAX_SLICES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """Where rounds go through an object store, when they close, and what is kept of them."""

    url: str = ""
    """``s3://bucket/prefix`` or a folder that all nodes share; empty: rounds go from node to node, unless ``access``
    is ``signed``, where the run's authority knows the bucket."""
    access: Access = "own"
    """``own``: with this node's credentials for the bucket; ``signed``: every request is signed by the run's authority
    (docs/admission.md), and the node needs none."""
    cdn: str = ""
    """``https://host/prefix`` under which a CDN serves the bucket: contributions and snapshots are read there first,
    verified as ever, and from the bucket where that fails."""
    members: tuple[str, ...] = ()
    """Keys of the nodes that may take part; empty: whoever can write to the bucket, or whom the run's authority
    admits."""
    max_members: int = 48
    """Contributions to a round; of more, those that come first in the round's own order."""
    num_slices: int = 0
    """Slices that members reduce for each other, two of them each, spot-checked by others; about as many as members,
    256 at most. 0: everybody fetches all contributions and reduces them. For dense vectors and rules by coordinates."""
    quorum: int = 0
    """Contributions with which a round closes at once; 0: with those of all members of the round before."""
    propose_after_s: float = 10.0
    """How long each node that comes first in a round's order is given to close it, before the next one may."""
    few_members_after_s: float = 600.0
    """So long after the first contribution, a round closes also without most members of the one before."""
    poll_interval_s: float = 1.0
    """Seconds between two looks at the bucket in a round."""
    watch_interval_s: float = 5.0
    """Seconds between two looks while the node trains, for others that wait for it."""
    snapshot_rounds: int = 5
    """Rounds between two snapshots of the state for late joiners; one that waits for a state has it with the next."""
    keep_rounds: int = 3
    """Rounds whose contributions are kept at least, for nodes that were away; those since the newest snapshot are."""
    prices: PriceList = "s3"
    """By which list the costs of a bucket are told: s3, r2 (Cloudflare), b2 (Backblaze) or none."""

    def __post_init__(self) -> None:
        for key in self.members:
            if not is_peer_id(key):
                raise TrainerUsageError(f"bucket.members: expected 64 hexadecimal digits each, found {key[:80]!r}")
        for name, least in (
            ("max_members", 1),
            ("snapshot_rounds", 1),
            ("keep_rounds", 1),
            ("quorum", 0),
            ("num_slices", 0),
        ):
            if getattr(self, name) < least:
                raise TrainerUsageError(f"bucket.{name}: expected {least} or more, found {getattr(self, name)}")
        if self.num_slices > MAX_SLICES:
            raise TrainerUsageError(f"bucket.num_slices: expected at most {MAX_SLICES}, found {self.num_slices}")
        if self.max_members > MAX_MEMBERS or self.quorum > self.max_members:
            raise TrainerUsageError(
                f"bucket.max_members, bucket.quorum: expected at most {MAX_MEMBERS}, and a quorum no greater, found "
                f"{self.max_members} and {self.quorum}"
            )
        for name in ("propose_after_s", "few_members_after_s", "poll_interval_s", "watch_interval_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TrainerUsageError(f"bucket.{name}: expected a number of seconds above 0, found {value}")
        if self.access not in get_args(Access):
            raise TrainerUsageError(f"bucket.access: expected own or signed, found {self.access!r}")
        if self.access == "signed" and self.url and not self.url.startswith("s3://"):
            raise TrainerUsageError(
                f"bucket.access signed: expected s3://bucket/prefix or no bucket.url, found {self.url}"
            )
        if self.cdn and not self.cdn.startswith(("http://", "https://")):
            raise TrainerUsageError(f"bucket.cdn: expected https://host/prefix, found {self.cdn[:160]!r}")
        if self.prices not in get_args(PriceList):
            raise TrainerUsageError(
                f"bucket.prices: expected one of {', '.join(get_args(PriceList))}, found {self.prices!r}"
            )

    @property
    def is_used(self) -> bool:
        """Whether rounds go through a bucket."""
        return bool(self.url) or self.access == "signed"

    @property
    def price_list(self) -> PriceList:
        """By which list costs are told: a folder costs nothing."""
        return self.prices if self.access == "signed" or self.url.startswith("s3://") else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a store asks, in US dollars."""

    write: float  # A PUT or a LIST.
    read: float  # A GET or a HEAD.
    sent_gb: float  # For 10**9 bytes that leave the store, over the internet.
    stored_gb_month: float


PRICES: Final = MappingProxyType[str, Prices](
    {
        "s3": Prices(write=5.0e-6, read=0.4e-6, sent_gb=0.09, stored_gb_month=0.023),
        "r2": Prices(write=4.5e-6, read=0.36e-6, sent_gb=0.0, stored_gb_month=0.015),
        "b2": Prices(write=0.0, read=0.4e-6, sent_gb=0.01, stored_gb_month=0.006),
        "none": Prices(write=0.0, read=0.0, sent_gb=0.0, stored_gb_month=0.0),
    }
)
"""List prices as of 2026-11-28, first tier, without free allowances: Amazon S3 Standard (us-east-1), Cloudflare R2,
Backblaze B2."""
