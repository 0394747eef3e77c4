"""`GenesisDataLoader`: the loader as a node's own loop uses it (spec L-1, L-6, L-9).

`get_batch` draws random windows of a shard with a generator seeded by run, node, shard and step, so that a batch can be
made again. Windows may overlap and repeat, so "all tokens of the shard used" (spec L-13) means: as many tokens drawn as
the shard holds. Use `GenesisDataset` to read each window once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from genesis.errors import TokenizerError, VocabularyMismatchError
from loader.errors import HostileStoreError, LoaderUsageError, StateMismatchError, TokenizerSyncError
from loader.options import StoreOptions
from loader.session import Session
from loader.stream.assignment import DEFAULT_COUNT, Assignment, assign
from loader.stream.plateau import LossHistory, PlateauKind, PlateauRule
from loader.stream.windows import start_positions
from manifests import ContractError, Manifest, sha256_hex

if TYPE_CHECKING:
    from genesis.tokenizer import StoreTokenizer

logger = logging.getLogger(__name__)

_VERSION: Final = 1
_SHARD_ID: Final = "genesis_shard_id"
"""The attribute that identifies a tensor's shard, which decides the windows that are drawn."""
_Count = Annotated[int, Field(strict=True, ge=0, le=2**62)]


class _State(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = _VERSION
    node_id: str
    seed: int
    shards: tuple[_Count, ...]
    shards_sha256: str
    """Digest over the shards' digests: another store has other shards under the same ids."""
    position: _Count
    """Rotations so far: the current shard is ``shards[position % len(shards)]``."""
    step: _Count
    """Batches drawn so far."""
    steps_on_shard: _Count
    tokens_drawn: _Count
    losses: tuple[float, ...]


class GenesisDataLoader:
    """A node's shards, batches of them, and the vocabulary they were written with."""

    GENESIS_CDN_URL: ClassVar[str] = "https://dwquwt9gkkeil.cloudfront.net"
    """Default address (spec L-1) if neither ``store`` nor ``GENESIS_STORE`` names a store."""

    def __init__(
        self,
        node_id: str,
        store: str | os.PathLike[str] | None = None,
        *,
        seed: int = 0,
        mirrors: Sequence[str] = (),
        public_key: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        timeout_s: float = 600.0,
        count: int = DEFAULT_COUNT,
        assignment: Assignment = "modulo",
        plateau: PlateauKind | PlateauRule = "absolute",
        tokenizer: StoreTokenizer | None = None,
    ) -> None:
        """Finds the store and the node's shards (spec L-1: the manifest is fetched here).

        Args:
            node_id: decides which shards.
            store: a folder, ``s3://bucket/prefix`` or ``http(s)://host/prefix``.
            seed: of the run.
            mirrors: further addresses of the same store.
            public_key: PEM file of the key that must have signed the manifest.
            cache_dir: where shards are kept.
            cache_bytes: how much is kept.
            timeout_s: how long to try for an object.
            count: shards the node is given.
            assignment: ``modulo`` (spec L-2) or ``rendezvous``.
            plateau: when `should_rotate` is true before the shard is used up.
            tokenizer: the vocabulary in use, which the store's must extend; by default the store's.

        Raises:
            LoaderUsageError: options that make no sense, or an empty store.
            DataUnavailableError: the store cannot be reached.
            UntrustedManifestError: its manifest cannot be trusted.
        """
        self._session = Session.open(
            StoreOptions.of(
                store or os.environ.get("GENESIS_STORE") or self.GENESIS_CDN_URL,
                mirrors=mirrors,
                public_key=public_key,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                timeout_s=timeout_s,
            )
        )
        self._node_id, self._seed = node_id, seed
        self._shards = assign(node_id, range(self._session.catalog.manifest.total_shards), count, assignment)
        self._rule = plateau if isinstance(plateau, PlateauRule) else PlateauRule(plateau)
        self._history = LossHistory(self._rule.history)
        self._position = self._step = self._steps_on_shard = self._tokens_drawn = 0
        self._tokenizer = tokenizer

    @property
    def manifest(self) -> Manifest:
        """The store's manifest when the run began."""
        return self._session.catalog.document()

    @property
    def assigned_shards(self) -> tuple[int, ...]:
        """The node's shards, the primary one first."""
        return self._shards

    @property
    def current_shard_id(self) -> int:
        """The shard to train on now."""
        return self._shards[self._position % len(self._shards)]

    @property
    def eos_id(self) -> int:
        """The id that ends every document: 2, or that of a vocabulary made elsewhere."""
        return self._session.catalog.manifest.eos_id

    @property
    def tokenizer(self) -> StoreTokenizer:
        """The vocabulary, fetched from the store at the first access.

        Raises:
            LoaderError: it is unavailable.
        """
        if self._tokenizer is None:
            self.sync_tokenizer()
        if self._tokenizer is None:
            raise TokenizerSyncError("expected a vocabulary from the store, found none")
        return self._tokenizer

    def sync_tokenizer(self) -> bool:
        """Takes the store's newest vocabulary (spec L-11), if it extends the one in use.

        Returns:
            Whether there were new merges.

        Raises:
            TokenizerSyncError: it does not extend the one in use: an id would change its meaning.
            LoaderError: it is unavailable.
        """
        from genesis.tokenizer import tokenizer_of

        # The first time the present manifest will do, so a node without a network can begin.
        catalog = self._session.catalog if self._tokenizer is None else self._session.newest_catalog()
        file = catalog.vocabulary()
        try:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_of(file)
                return True
            if type(file) is not type(self._tokenizer.to_file()):
                raise VocabularyMismatchError("one of them was made elsewhere and the other was not")
            grew = self._tokenizer.update_from_dict(file.to_object())
        except VocabularyMismatchError as error:
            raise TokenizerSyncError(f"the store's vocabulary does not extend the one in use: {error}") from None
        except (ContractError, TokenizerError) as error:
            raise HostileStoreError(f"the manifest vouches for a vocabulary that is none: {error}") from None
        if grew:
            logger.info("Updated tokenizer: %d vocab", self._tokenizer.current_vocab_size)
        return grew

    def download_shard(self, shard_id: int) -> torch.Tensor:
        """A shard's ids, verified, from the cache or the store.

        Returns:
            int64[shard_tokens], mapped; writing to it stays in this process. The cached file is in use while it lives.

        Raises:
            LoaderError: it is unavailable.
        """
        shard = torch.from_numpy(self._session.open_shard(shard_id).ids)
        setattr(shard, _SHARD_ID, shard_id)
        return shard

    def get_batch(
        self,
        shard: torch.Tensor,
        batch_size: int = 4,
        seq_len: int = 512,
        *,
        step: int | None = None,
        shard_id: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random windows of a shard (spec L-9), the same for the same run, node, shard and step.

        Args:
            shard: int64[N], N > seq_len, of `download_shard`.
            batch_size: B.
            seq_len: T.
            step: makes the batch of that step and leaves the loader unchanged; by default the next one.
            shard_id: the shard's id; a tensor of `download_shard` has it, a copy or slice of one has not.

        Returns:
            ``input_ids`` and ``labels``, int64[B, T].

        Raises:
            LoaderUsageError: the shard is too short, or its id is unknown.
        """
        if batch_size < 1 or not 1 <= seq_len < len(shard):
            raise LoaderUsageError(
                f"expected a batch of 1 row or more of 1 to {len(shard) - 1} ids, found {batch_size} of {seq_len}"
            )
        known_id = shard_id if shard_id is not None else getattr(shard, _SHARD_ID, None)
        if known_id is None:
            raise LoaderUsageError("expected a tensor of download_shard, found another; say which with shard_id=")
        at = self._step if step is None else step
        # The last start that leaves room for the last label is drawn too (spec L-9).
        starts = start_positions(batch_size, len(shard) - seq_len, self._seed, self._node_id, known_id, at)
        columns = np.arange(seq_len)
        rows = torch.from_numpy(starts[:, None] + columns)
        if step is None:
            self._step += 1
            self._steps_on_shard += 1
            self._tokens_drawn += batch_size * seq_len
        return shard[rows], shard[rows + 1]

    def report_loss(self, loss: float | torch.Tensor) -> None:
        """Feeds the plateau rule."""
        self._history.add(loss.item() if isinstance(loss, torch.Tensor) else float(loss))

    def should_rotate(self) -> bool:
        """Whether the current shard is used up, or the loss has plateaued (spec L-13, L-14)."""
        if self._tokens_drawn >= self._session.catalog.manifest.shard_tokens:
            return True
        if self._steps_on_shard < self._rule.min_steps:
            return False
        plateau = self._rule.plateau(self._history.losses())
        if plateau is not None:
            logger.info("[GENESIS] Loss plateau detected: avg=%.4f, variance=%.6f", plateau.mean, plateau.variance)
        return plateau is not None

    def rotate(self) -> int:
        """Moves to the node's next shard; returns its id."""
        self._position += 1
        self._steps_on_shard = self._tokens_drawn = 0
        self._history.clear()
        logger.info("[GENESIS] Rotating to fresh data for continued learning")
        return self.current_shard_id

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader: plain JSON values."""
        return _State(
            node_id=self._node_id,
            seed=self._seed,
            shards=self._shards,
            shards_sha256=self._digest_of(self._shards),
            position=self._position,
            step=self._step,
            steps_on_shard=self._steps_on_shard,
            tokens_drawn=self._tokens_drawn,
            losses=tuple(self._history.losses()),
        ).model_dump(mode="json")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state.

        Raises:
            StateMismatchError: the state belongs to another node, run or release, or names shards the store has not.
        """
        try:
            state = _State.model_validate(state_dict)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise StateMismatchError(f"expected a loader state, found a damaged one ({first['msg']})") from None
        if (state.version, state.node_id, state.seed) != (_VERSION, self._node_id, self._seed):
            raise StateMismatchError(
                f"expected a state of version {_VERSION}, node {self._node_id!r} and seed {self._seed}, found version "
                f"{state.version}, node {state.node_id!r} and seed {state.seed}"
            )
        if not state.shards or max(state.shards) >= self._session.catalog.manifest.total_shards:
            raise StateMismatchError(f"expected shards that the store has, found {list(state.shards)}")
        if state.shards_sha256 != self._digest_of(state.shards):
            raise StateMismatchError(
                f"expected the shards {list(state.shards)} that the run read, found others under the same ids: this is "
                "another store, or it was made anew"
            )
        # The run stays pinned to what it was assigned when it began, however far the store has grown since.
        self._shards, self._position, self._step = state.shards, state.position, state.step
        self._steps_on_shard, self._tokens_drawn = state.steps_on_shard, state.tokens_drawn
        self._history = LossHistory(self._rule.history, state.losses)

    def _digest_of(self, shards: Sequence[int]) -> str:
        catalog = self._session.catalog
        return sha256_hex("\n".join(catalog.entry(shard).sha256 for shard in shards).encode())
