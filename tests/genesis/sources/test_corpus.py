"""The corpus's real text, against a reading by other means; skipped where it is not there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard

from genesis.sources import resolve
from manifests import SourceSpec
from tests.support.source_documents import read_on

CORPUS = Path(__file__).parents[4] / "shared" / "corpus"

pytestmark = pytest.mark.skipif(not CORPUS.is_dir(), reason=f"no corpus in {CORPUS}")


def plain_reading(path: Path) -> list[str]:
    if path.suffix == ".parquet":
        return pq.read_table(path, columns=["text"]).column("text").to_pylist()
    data = path.read_bytes()
    if path.suffix == ".gz":
        return [json.loads(line)["text"] for line in gzip.decompress(data).splitlines()]
    plain = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    return [json.loads(line)["text"] for line in plain.decode().split("\n") if line]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fineweb-edu", "slimpajama", "c4", "multilingual"])
def test_documents_are_those_of_a_plain_reading(name: str):
    plan = resolve(SourceSpec(name="mine"), [str(CORPUS / name)])
    path = Path(plan.files[0].location)
    reading = read_on(resolve(SourceSpec(name="mine"), [str(path)]))
    assert reading.documents == [text.encode() for text in plain_reading(path)]
    assert reading.rows == len(reading.documents)


@pytest.mark.slow
def test_the_counts_are_those_the_corpus_states():
    plan = resolve(SourceSpec(name="mine"), [f"{CORPUS}/fineweb-edu/*.parquet"])
    reading = read_on(plan)
    assert len(reading.documents) == 9715 + 9716 + 9715 + 9716
    assert sum(map(len, reading.documents)) == 37874461 + 38384462 + 38153951 + 38534386
    for count in (9716, 38_000):
        assert read_on(plan, reading.cursors[count - 1]).documents == reading.documents[count:]
