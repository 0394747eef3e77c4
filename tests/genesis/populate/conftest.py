"""The text that the populate tests share, and the store it gives when nothing disturbs the run."""

import pytest

from tests.support.documents import documents, write_parquet
from tests.support.populating import genesis, populate_arguments, snapshot


@pytest.fixture(scope="session")
def small_input(tmp_path_factory):
    """A parquet file of 400 documents: 42 shards of 2,000 tokens."""
    return write_parquet(tmp_path_factory.mktemp("small") / "a.parquet", documents(seed=11, count=400), 30)


@pytest.fixture(scope="session")
def undisturbed(small_input, tmp_path_factory):
    """What populating `small_input` in peace gives."""
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    genesis(*populate_arguments(store, small_input), "--workers", "1")
    return snapshot(store)
