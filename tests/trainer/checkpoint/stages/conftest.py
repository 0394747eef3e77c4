"""A tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests import FIRST_MERGE_ID, VocabularyFile

MERGES = [(114 + 10, 111), (266, 118), (42, 126)]
NUM_IDS = FIRST_MERGE_ID + len(MERGES)


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(VocabularyFile.from_pairs(MERGES, {"tiny": len(MERGES)}).to_json())
    return path
