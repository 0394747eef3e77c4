"""Texts and a vocabulary that every machine can make: the running Python's own standard library is what is read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from genesis.tokenizer import NeuroTokenizer


@pytest.fixture(scope="session")
def python_sources() -> list[bytes]:
    """The first 120 modules of the standard library by name, about 2.5 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path.read_bytes() for path in sorted(folder.glob("*.py"))[:120]]


@pytest.fixture(scope="session")
def trained(python_sources: list[bytes]) -> NeuroTokenizer:
    """1,500 merges of that text, in which English, identifiers and white space all occur. Not to be changed."""
    tokenizer = NeuroTokenizer.empty()
    tokenizer.learn_merges(
        [*python_sources[:60], "naïve café ’s Привет 世界 😀 ".encode() * 50], 1500, source="python-docs"
    )
    return tokenizer
