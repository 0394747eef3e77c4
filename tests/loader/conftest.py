"""Stores of fixed ids and a cache of each test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.support.token_store import TokenStore

if TYPE_CHECKING:
    from loader import GenesisDataset

# Two cores shared by many test processes: how long an example takes says nothing.
hypothesis.settings.register_profile("loader", deadline=None)
hypothesis.settings.load_profile("loader")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rounds over mirrors that give nothing right: a second each would be half of what these tests take."""
    monkeypatch.setattr("loader.fetch.mirrors._PAUSE_S", 0.05)


@pytest.fixture(scope="session")
def six_shards(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Six shards of 2,000 ids of one source; tests only read it."""
    return TokenStore.of(tmp_path_factory.mktemp("six") / "store", 6)


@pytest.fixture(scope="session")
def two_sources(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Ten shards of 2,000 ids, alpha and beta taking turns; tests only read it."""
    return TokenStore.of(tmp_path_factory.mktemp("two") / "store", 10, sources=("alpha", "beta"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for the stores that tests only read."""
    return tmp_path_factory.mktemp("shared-cache")


@pytest.fixture
def make_dataset(shared_cache: Path) -> Callable[..., GenesisDataset]:
    """A dataset with small batches, at a state if one is given; whatever else is given replaces that."""
    from loader import GenesisDataset  # Brings torch, which not every test below this folder needs.

    def make(
        store: TokenStore, node_id: str = "node-a", state: dict[str, Any] | None = None, **options: object
    ) -> GenesisDataset:
        given: dict[str, object] = {"seq_len": 64, "batch_size": 4, "cache_dir": shared_cache, "timeout_s": 20.0}
        dataset = GenesisDataset(store.url, node_id, **{**given, **options})  # type: ignore[arg-type]
        if state is not None:
            dataset.load_state_dict(state)
        return dataset

    return make
