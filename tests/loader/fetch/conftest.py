"""A key to pin."""

from __future__ import annotations

from pathlib import Path

import pytest

from manifests import public_key_pem
from tests.support.small_store import PRIVATE_KEY


@pytest.fixture
def public_key(tmp_path: Path) -> Path:
    """The public half of `PRIVATE_KEY`, as PEM."""
    path = tmp_path / "store.pub"
    path.write_bytes(public_key_pem(PRIVATE_KEY.public_key()))
    return path
