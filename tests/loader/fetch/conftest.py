"""A key to pin, and sessions that ask their store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from loader import GenesisDataset
from loader.options import StoreOptions
from loader.session import Session
from manifests import public_key_pem
from tests.support.small_store import PRIVATE_KEY

OpenSession: TypeAlias = Callable[..., Session]
OpenDataset: TypeAlias = Callable[..., GenesisDataset]


@pytest.fixture
def public_key(tmp_path: Path) -> Path:
    """The public half of `PRIVATE_KEY`, as PEM."""
    path = tmp_path / "store.pub"
    path.write_bytes(public_key_pem(PRIVATE_KEY.public_key()))
    return path


@pytest.fixture
def open_session(tmp_path: Path) -> Iterator[OpenSession]:
    """Asks the store at every opening, unless told otherwise."""
    opened: list[Session] = []

    def make(*addresses: str, **options: Any) -> Session:
        given = {"cache_dir": tmp_path / "cache", "cache_bytes": 10**9, "timeout_s": 4.0, "manifest_max_age_s": 0.0}
        opened.append(Session.open(StoreOptions(mirrors=addresses, **{**given, **options})))
        return opened[-1]

    yield make
    for session in opened:
        session.mirrors.close()


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenDataset]:
    """A dataset of small batches of an address, and of mirrors of it."""
    opened: list[GenesisDataset] = []

    def make(address: str, *mirrors: str, **options: Any) -> GenesisDataset:
        given = {"seq_len": 64, "batch_size": 4, "cache_dir": tmp_path / "cache", "timeout_s": 10.0}
        opened.append(GenesisDataset(address, "node-a", mirrors=mirrors, **{**given, **options}))
        return opened[-1]

    yield make
    for dataset in opened:
        dataset.close()
