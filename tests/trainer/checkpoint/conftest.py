from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.model_configs import write_tokenizer


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)
