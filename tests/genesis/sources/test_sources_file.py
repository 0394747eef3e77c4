"""The patterns of sources.json against names that are known to be in those repositories (docs/sources.md)."""

from __future__ import annotations

import pytest

from genesis.sources.base import matches
from genesis.sources.opening import format_of
from manifests import TOTAL_MERGES, builtin_sources

KNOWN = {
    "fineweb-edu": (
        ["sample/10BT/000_00000.parquet"],
        ["sample/100BT/000_00000.parquet", "data/CC-MAIN-2024-10/a.parquet"],
    ),
    "fineweb": (["sample/100BT/001_00005.parquet"], ["sample/10BT/001_00005.parquet"]),
    "redpajama": (
        ["arxiv_sample.jsonl", "cc_2019-30_sample.jsonl", "cc_2023-06_sample.jsonl", "wikipedia_sample.jsonl"],
        ["book_sample.jsonl", "RedPajama-Data-1T-Sample.py"],
    ),
    "slimpajama": (
        ["train/chunk1/example_train_0.jsonl.zst", "train/chunk10/example_train_5910.jsonl.zst"],
        ["validation/chunk1/example_holdout_0.jsonl.zst", "test/chunk1/example_holdout_0.jsonl.zst"],
    ),
    "c4": (
        ["en/c4-train.00000-of-01024.json.gz"],
        ["en/c4-validation.00000-of-00008.json.gz", "en.noblocklist/c4-train.00000-of-01024.json.gz"],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_patterns_take_the_training_files_and_no_others(name: str):
    spec = builtin_sources().get(name)
    assert spec is not None
    taken, left = KNOWN[name]
    for path in taken:
        assert sum(matches(path, pattern) for pattern in spec.data_files) == 1
        assert format_of(path) is not None
    for path in left:
        assert not any(matches(path, pattern) for pattern in spec.data_files)


def test_the_five_sources_share_the_whole_vocabulary_by_priority():
    sources = builtin_sources()
    assert sum(source.merges for source in sources.sources) == TOTAL_MERGES
    assert [source.name for source in sources.enabled()] == list(KNOWN)
