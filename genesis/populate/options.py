"""What a user can choose about a populate run."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal, get_args

from genesis.errors import UsageError
from genesis.populate.commit_log import SUPERSEDED_KEEP_S
from genesis.populate.lease import LEASE_S
from genesis.token_formats import TokenFormat
from manifests import MAX_VOCABULARY, SHARD_TOKENS, FrozenVocabularyFile, SourceSpec, VocabularyFile

EngineName = Literal["local", "ray"]
"""What does the work: processes of this machine, or a Ray cluster."""


def available_cpus() -> int:
    """Processors this process may run on: fewer than the machine's under taskset or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnOptions:
    """How much vocabulary is learned, and from what."""

    documents: int = 10_000
    """Documents, from the source's beginning, that merges are learned from (spec G-5)."""
    merges: int | None = None
    """Merges to learn; None for the policy: 31,734 in an empty store, the source's share in another."""

    def __post_init__(self) -> None:
        """Checks ranges."""
        if self.documents < 1:
            raise UsageError(f"--learn-documents: expected 1 or more, found {self.documents}")
        if self.merges is not None and not 0 <= self.merges <= MAX_VOCABULARY:
            raise UsageError(f"--merges: expected 0 to {MAX_VOCABULARY}, found {self.merges}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOptions:
    """Of a source that comes as ids: how they are read, and which vocabulary they are of."""

    token_format: TokenFormat
    vocabulary: VocabularyFile | None = None
    """The vocabulary they were made with; None: the store's own."""
    append_eos: bool = False
    """Give an EOS to documents that do not end with one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulateOptions:
    """One source into one store."""

    spec: SourceSpec
    store_url: str
    inputs: tuple[str, ...] = ()
    """Files, folders or patterns to read instead of the Hub."""
    num_workers: int = field(default_factory=available_cpus)
    shard_tokens: int = SHARD_TOKENS
    max_shards: int | None = None
    """Stop when the source has this many shards in the store; None for its ``target_shards``."""
    max_documents: int | None = None
    """Read no further than this many documents from the source's beginning."""
    learn: LearnOptions = field(default_factory=LearnOptions)
    tokens: TokenOptions | None = None
    """The inputs are ids instead of text; nothing is learned or encoded then."""
    tokenizer: FrozenVocabularyFile | None = None
    """A vocabulary made elsewhere, for a store that has none yet or this one; None to follow the store, or to learn."""
    packed: bool = True
    """Also write each shard's transfer form, ``packed/shard_{id}.zst``."""
    mended_input: bool = False
    """The file the checkpoint stands in may differ from what it was: it was damaged, and mended behind that row."""
    engine: EngineName = "local"
    ray_address: str = "local"
    """For the engine ``ray``: ``local`` starts a cluster of this machine, ``auto`` finds the one that it belongs to,
    ``ray://HOST:PORT`` one elsewhere, and ``HOST:PORT`` the one that it belongs to by name."""
    max_encoding: int | None = None
    """On a cluster that runs already: documents are encoded on at most this many processors; None for all."""
    lease_s: float = LEASE_S
    superseded_keep_s: float = SUPERSEDED_KEEP_S

    def __post_init__(self) -> None:
        """Checks ranges."""
        for name, value in (("--workers", self.num_workers), ("--shard-tokens", self.shard_tokens)):
            if value < 1:
                raise UsageError(f"{name}: expected 1 or more, found {value}")
        if not 1 <= self.lease_s <= 86_400:
            raise UsageError(f"--lease-s: expected 1 to 86400 seconds, found {self.lease_s}")
        if self.engine not in get_args(EngineName):
            raise UsageError(f"--engine: expected {' or '.join(get_args(EngineName))}, found {self.engine!r}")
        if self.max_encoding is not None and self.max_encoding < 1:
            raise UsageError(f"--workers: expected 1 or more, found {self.max_encoding}")
        if self.tokens is not None and self.engine != "local":
            raise UsageError(f"--engine {self.engine}: expected text, found ids; import them with the local engine")
        if "" in self.inputs:
            raise UsageError("--input: expected a file, a folder or a pattern, found an empty string")
        for name, limit in (("--max-shards", self.max_shards), ("--max-documents", self.max_documents)):
            if limit is not None and limit < 0:
                raise UsageError(f"{name}: expected 0 or more, found {limit}")

    @property
    def shard_limit(self) -> int | None:
        """Shards of the source in the store at which to stop; None for no limit."""
        if self.max_shards is not None:
            return self.max_shards
        return self.spec.target_shards or None
