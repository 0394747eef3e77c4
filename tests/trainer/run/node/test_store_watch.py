"""What a node learns of a store that grows, or goes away, while it trains; it never waits for the answer."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from loader.session import Session
from tests.support.growing_store import copy_text_store, grow_text_store
from trainer.run.config import DataConfig
from trainer.run.node.data import StoreWatch, open_session


def opened(store: Path, tmp_path: Path) -> Session:
    return open_session(DataConfig(store=str(store), cache_dir=str(tmp_path / "cache"), timeout_s=1.0))


def looked_until_answered(watch: StoreWatch) -> bool:
    """Looks until the question that is asked now is answered."""
    grown = watch.look()
    deadline_s = time.monotonic() + 60
    while not grown and watch.is_asking:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
        grown = watch.look()
    return grown


@pytest.mark.slow
def test_a_grown_store_is_seen(tmp_path: Path) -> None:
    store = copy_text_store(tmp_path / "store")
    watch = StoreWatch(opened(store, tmp_path), 1e-9)
    assert (watch.rows(), looked_until_answered(watch)) == (1024, False)
    grow_text_store(store)
    assert looked_until_answered(watch)
    assert (watch.rows(), watch.vocabulary.next_merge_id > 1024) == (2048, True)
    assert not looked_until_answered(watch)


@pytest.mark.slow
def test_it_is_asked_no_more_often_than_it_should_be(tmp_path: Path) -> None:
    store = copy_text_store(tmp_path / "store")
    now_s = 0.0
    watch = StoreWatch(opened(store, tmp_path), 60.0, lambda: now_s)
    grow_text_store(store)
    now_s = 59.0
    assert not looked_until_answered(watch)
    now_s = 61.0
    assert looked_until_answered(watch)


@pytest.mark.slow
def test_a_store_that_is_gone_is_only_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = copy_text_store(tmp_path / "store")
    watch = StoreWatch(opened(store, tmp_path), 1e-9)
    shutil.rmtree(store)
    assert not looked_until_answered(watch)
    assert "the store cannot be asked for what is new" in caplog.text
    assert watch.rows() == 1024
