"""Texts and a vocabulary that every machine can make: the running Python's own standard library is what is read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from genesis.tokenizer import NeuroTokenizer

CORPUS = Path(__file__).resolve().parents[4] / "shared" / "corpus"


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


@pytest.fixture(scope="session")
def corpus_texts() -> list[bytes]:
    """Real English and multilingual documents, where the corpus is there."""
    parquet = pytest.importorskip("pyarrow.parquet")
    files = [CORPUS / "fineweb-edu" / "003_00000.parquet", CORPUS / "multilingual" / "multi.parquet"]
    if not all(file.exists() for file in files):
        pytest.skip("the corpus is not beside this checkout")
    tables = [parquet.read_table(file, columns=["text"]).slice(0, 250) for file in files]
    return [text.encode() for table in tables for text in table["text"].to_pylist()]
