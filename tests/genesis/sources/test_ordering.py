from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from genesis.sources.base import fixed_folder, matches, natural_key


def test_digits_count_as_numbers_and_folders_stay_together():
    names = [
        "train/chunk1/example_train_0.jsonl.zst",
        "train/chunk1/example_train_2.jsonl.zst",
        "train/chunk1/example_train_10.jsonl.zst",
        "train/chunk2/example_train_1.jsonl.zst",
        "train/chunk10/example_train_0.jsonl.zst",
        "train-extra/0.jsonl.zst",
    ]
    shuffled = random.Random(3).sample(names, len(names))
    assert sorted(shuffled, key=natural_key) == names


@given(st.lists(st.text(alphabet="ab01²/.-_", min_size=1, max_size=8), unique=True))
def test_every_two_names_have_one_order(names: list[str]):
    ordered, backwards = sorted(names, key=natural_key), names[::-1]
    assert sorted(backwards, key=natural_key) == ordered
    assert len({natural_key(name) for name in names}) == len(names)


def test_a_star_stays_within_its_folder_and_two_cross_folders():
    assert matches("en/c4-train.00000-of-01024.json.gz", "en/c4-train.*.json.gz")
    assert not matches("en.noclean/en/c4-train.00000-of-01024.json.gz", "en/c4-train.*.json.gz")
    assert not matches("en/c4-validation.00000-of-00008.json.gz", "en/c4-train.*.json.gz")
    assert not matches("data/a/b.parquet", "data/*.parquet")
    assert matches("data/a/b.parquet", "data/**/*.parquet")
    assert matches("data/b.parquet", "data/**/*.parquet")
    assert matches("a/b/c.txt", "**")


def test_only_the_fixed_folder_is_listed():
    assert fixed_folder("train/chunk*/*.jsonl.zst") == "train"
    assert fixed_folder("sample/10BT/*.parquet") == "sample/10BT"
    assert fixed_folder("*.jsonl") == ""
