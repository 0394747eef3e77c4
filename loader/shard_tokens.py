"""`ShardTokens`: the windows of some shards as a map-style dataset, for samplers, evaluation and other loaders' mixing.

Index to shard and window is arithmetic; without a sampler the order is that of the shards. Up to eight shards stay
mapped; with a sampler that jumps between more, a shard is verified again each time it comes round.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset

from loader.errors import LoaderUsageError, StateMismatchError
from loader.options import StoreOptions
from loader.session import Session
from loader.stream.windows import WindowView, num_windows
from manifests import sha256_hex

STATE_VERSION: Final = 1
_MOST_OPEN: Final = 8

Window = dict[str, torch.Tensor]


class ShardTokens(Dataset[Window]):
    """All windows of some shards; ``dataset[i]`` is ``{"input_ids": int64[T], "labels": int64[T]}``."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        shards: Sequence[int] | None = None,
        *,
        seq_len: int = 1024,
        mirrors: Sequence[str] = (),
        public_key: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Finds the store, here as in `GenesisDataset`, so that all workers share the manifest.

        Args:
            store: a folder, ``s3://bucket/prefix`` or ``http(s)://host/prefix``.
            shards: their ids; by default all of the store.
            seq_len: T.
            mirrors: further addresses of the same store.
            public_key: PEM file of the key that must have signed the manifest.
            cache_dir: where shards are kept.
            cache_bytes: how much is kept.
            timeout_s: how long to try for a shard.

        Raises:
            LoaderUsageError: invalid options, or a shard the store has not.
            DataUnavailableError: the store cannot be reached.
            UntrustedManifestError: its manifest cannot be trusted.
        """
        if seq_len < 1:
            raise LoaderUsageError(f"seq_len: expected 1 or more, found {seq_len}")
        self._session = Session.open(
            StoreOptions.of(
                store,
                mirrors=mirrors,
                public_key=public_key,
                cache_dir=cache_dir,
                cache_bytes=cache_bytes,
                timeout_s=timeout_s,
            )
        )
        catalog = self._session.catalog
        self._shards = tuple(shards) if shards is not None else tuple(range(catalog.manifest.total_shards))
        self._seq_len = seq_len
        self._windows = num_windows(catalog.manifest.shard_tokens, seq_len)
        if not self._windows:
            most = catalog.manifest.shard_tokens - 1
            raise LoaderUsageError(f"expected seq_len to be at most {most}, which a shard holds, found {seq_len}")
        self._sha256 = sha256_hex("\n".join(catalog.entry(shard).sha256 for shard in self._shards).encode())
        self._open: OrderedDict[int, WindowView] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shards) * self._windows

    def __getitem__(self, index: int) -> Window:
        inputs, labels = self._gather(np.asarray([self._checked(index)]))
        return {"input_ids": inputs[0], "labels": labels[0]}

    def __getitems__(self, indices: Sequence[int]) -> list[Window]:
        """Several windows at once, as DataLoader asks for a batch."""
        inputs, labels = self._gather(np.asarray([self._checked(index) for index in indices]))
        return [{"input_ids": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Identifies the windows; the sampler must remember which of them were read."""
        return {
            "version": STATE_VERSION,
            "seq_len": self._seq_len,
            "shards": list(self._shards),
            "shards_sha256": self._sha256,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Checks that indices mean what they meant.

        Raises:
            StateMismatchError: they do not.
        """
        for name, expected in self.state_dict().items():
            found = state_dict.get(name)
            if found != expected:
                raise StateMismatchError(
                    f"expected a state with {name}={expected!r}, as this dataset has, found {found!r}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _checked(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected an index below {len(self)}, found {index}")
        return index % len(self)

    def _gather(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = np.empty((len(indices), self._seq_len), dtype=np.int64)
        labels = np.empty_like(inputs)
        ordinals, windows = np.divmod(indices, self._windows)
        for ordinal in np.unique(ordinals):
            rows = ordinals == ordinal
            inputs[rows], labels[rows] = self._view(self._shards[ordinal]).gather(windows[rows])
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def _view(self, shard_id: int) -> WindowView:
        view = self._open.pop(shard_id, None)
        if view is None:
            view = WindowView.of(self._session.open_shard(shard_id).ids, self._seq_len)
        self._open[shard_id] = view
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return view
