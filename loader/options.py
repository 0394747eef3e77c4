"""Options of users: where the shards come from, and which stream of them a node reads."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, get_args

from loader.cache import settings as cache_settings
from loader.errors import LoaderUsageError
from loader.stream.assignment import DEFAULT_COUNT, Assignment, check_node_id
from loader.stream.mixture import Mixture
from loader.stream.plateau import PlateauRule

Split = Literal["train", "holdout"]
Labels = Literal["shifted", "input_ids"]
Extra = Literal["positions", "document_ids", "cu_seqlens"]


def default_store() -> str:
    """The default store: ``GENESIS_STORE``, or the folder that `genesis populate` fills by default."""
    return os.environ.get("GENESIS_STORE") or str(Path("~/.neuroshard/genesis-store").expanduser())


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where shards come from and where they are kept.

    Raises:
        LoaderUsageError: a value is invalid.
    """

    mirrors: tuple[str, ...]
    """Addresses of the same store, tried in this order; the first names it."""
    public_key: Path | None = None
    """Ed25519 public key (PEM) that must have signed the manifest."""
    cache_dir: Path = field(default_factory=cache_settings.cache_dir)
    cache_bytes: int = field(default_factory=cache_settings.cache_bytes)
    max_bytes_per_s: float | None = None
    """Cap on what is downloaded; None for none."""
    timeout_s: float = 600.0
    """How long an object is tried for, over all mirrors, before `DataUnavailableError`."""
    manifest_max_age_s: float = 60.0
    """A manifest verified within this time is taken at the start without a request."""
    max_shard_bytes: int = 1 << 28
    """Larger shards are refused as hostile; an honest one has 20 MB."""

    def __post_init__(self) -> None:
        if not self.mirrors or not all(self.mirrors):
            raise LoaderUsageError(
                "expected the address of a store, found none; give a folder, s3:// or http(s):// URL"
            )
        for name in ("cache_bytes", "timeout_s", "manifest_max_age_s", "max_shard_bytes"):
            if getattr(self, name) < 0:
                raise LoaderUsageError(f"{name}: expected 0 or more, found {getattr(self, name)}")
        if self.max_bytes_per_s is not None and self.max_bytes_per_s <= 0:
            raise LoaderUsageError(f"max_bytes_per_s: expected more than 0, found {self.max_bytes_per_s}")

    @classmethod
    def of(
        cls,
        store: str | os.PathLike[str],
        *,
        mirrors: Sequence[str] = (),
        public_key: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        max_bytes_per_s: float | None = None,
        timeout_s: float = 600.0,
    ) -> Self:
        """Options from paths of any type, sizes such as ``"20GB"``, and None for the default.

        Raises:
            LoaderUsageError: a value is invalid.
        """
        if isinstance(mirrors, str) or store is None:
            raise LoaderUsageError(f"expected a store's address and a list of mirrors, found {store!r} and {mirrors!r}")
        return cls(
            mirrors=(str(store), *mirrors),
            public_key=Path(public_key) if public_key is not None else None,
            cache_dir=cache_settings.cache_dir(cache_dir),
            cache_bytes=cache_settings.cache_bytes(cache_bytes),
            max_bytes_per_s=max_bytes_per_s,
            timeout_s=timeout_s,
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The stream of windows that a node reads: the same options and store give the same stream.

    Raises:
        LoaderUsageError: a value is invalid.
    """

    node_id: str
    seq_len: int = 1024
    batch_size: int = 8
    """Rows of a batch, of each rank."""
    seed: int = 0
    """The seed of the run, shared by its nodes."""
    count: int | None = DEFAULT_COUNT
    """Shards assigned to a node, of each source; None for all there are."""
    total_shards: int | None = None
    """Begin as if the store had only its first so many shards; None for all that are there then."""
    assignment: Assignment = "modulo"
    sources: tuple[tuple[str, float], ...] = ()
    """Sources and their weights; empty for all shards alike."""
    mixture: Mixture = "exact"
    """The order in which sources take turns; `weyl` is that of runs begun before there was `exact`."""
    holdout: int = 0
    """The first so many shards of every source are never trained on."""
    split: Split = "train"
    epochs: int | None = None
    """End after this many passes over the node's shards; None for never."""
    plateau: PlateauRule = field(default_factory=PlateauRule)
    extras: tuple[Extra, ...] = ()
    labels: Labels = "shifted"
    """``input_ids`` for models that shift the labels themselves."""
    rank: int = 0
    """Which of the ranks that deal the node's windows out among themselves."""
    world_size: int = 1

    @property
    def rows_per_step(self) -> int:
        """Rows of a batch of all ranks together."""
        return self.batch_size * self.world_size

    @property
    def num_lanes(self) -> int:
        """One lane per source, or one for all shards."""
        return max(1, len(self.sources))

    def __post_init__(self) -> None:
        if not isinstance(self.node_id, str):
            raise LoaderUsageError(f"node_id: expected a name, found {self.node_id!r}")
        check_node_id(self.node_id)
        for name in ("seq_len", "batch_size", "seed", "holdout", "rank", "world_size"):
            _whole(name, getattr(self, name))
        for name in ("seq_len", "batch_size", "world_size"):
            if getattr(self, name) < 1:
                raise LoaderUsageError(f"{name}: expected 1 or more, found {getattr(self, name)}")
        for name in ("epochs", "count", "total_shards"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
                if getattr(self, name) < 1:
                    raise LoaderUsageError(f"{name}: expected 1 or more, or None, found {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise LoaderUsageError(
                f"rank: expected 0 to {self.world_size - 1}, since world_size is {self.world_size}, found {self.rank}"
            )
        if self.world_size > 1 and self.plateau.kind != "off":
            raise LoaderUsageError(
                f"plateau: expected 'off' with {self.world_size} ranks, which must leave a shard together, found "
                f"{self.plateau.kind!r}"
            )
        if self.holdout < 0:
            raise LoaderUsageError(f"holdout: expected 0 or more shards, found {self.holdout}")
        _one_of("assignment", self.assignment, get_args(Assignment))
        _one_of("split", self.split, get_args(Split))
        _one_of("mixture", self.mixture, get_args(Mixture))
        _one_of("labels", self.labels, get_args(Labels))
        for extra in self.extras:
            _one_of("extras", extra, get_args(Extra))
        weights = [weight for _, weight in self.sources]
        if not all(0 < weight < math.inf for weight in weights) or len(dict(self.sources)) != len(self.sources):
            raise LoaderUsageError(
                f"sources: expected different names with finite weights above 0, found {self.sources}"
            )


def _whole(name: str, found: object) -> None:
    if not isinstance(found, int) or isinstance(found, bool):
        raise LoaderUsageError(f"{name}: expected a whole number, found {found!r}")


def _one_of(name: str, found: str, known: tuple[str, ...]) -> None:
    if found not in known:
        raise LoaderUsageError(f"{name}: expected one of {', '.join(known)}, found {found!r}")
