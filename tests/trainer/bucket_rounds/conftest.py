"""Replicas of a test end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.bucket_rounds import close_collectives


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_collectives()
