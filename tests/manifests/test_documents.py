"""Every document: written and read back equal, one spelling a value, and hostile files refused in a line."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manifests import (
    Checkpoints,
    ContractError,
    InvalidDocumentError,
    Manifest,
    Segment,
    SourcesFile,
    UnsupportedFormatError,
    VocabularyFile,
    builtin_sources,
    canonical_json,
    format_time,
    parse_time,
)
from tests.support.contract_strategies import (
    CHECKPOINTS,
    SOURCES,
    frozen_manifests,
    frozen_vocabularies,
    manifests,
    segments,
    vocabularies,
)

DOCUMENTS = st.one_of(
    manifests(), frozen_manifests(), segments(), vocabularies(), frozen_vocabularies(), CHECKPOINTS, SOURCES
)
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

DIGEST = "0" * 64
TIME = "2026-11-20T17:32:03Z"
MANIFEST: dict[str, Any] = {
    "format": 1,
    "total_shards": 2,
    "total_tokens": 20,
    "total_size_bytes": 4000,
    "sources": {"a": {"shards": 2, "tokens": 20, "documents_processed": 5, "last_shard_id": 1}},
    "shard_tokens": 10,
    "index": [{"key": "index/segment_00000-0.json", "sha256": DIGEST, "first_shard": 0, "shards": 2}],
    "created_at": TIME,
    "updated_at": TIME,
}
ENTRY: dict[str, Any] = {
    "id": 0,
    "sha256": DIGEST,
    "size_bytes": 1,
    "tokens": 10,
    "source": "a",
    "first_document": 0,
    "last_document": 3,
    "next_merge_id": 300,
}


@RELAXED
@given(DOCUMENTS)
def test_what_was_written_is_read_back_and_equal_values_give_equal_bytes(document):
    body = document.to_json()
    assert type(document).from_json(body) == document
    assert type(document).from_json(body).to_json() == body == canonical_json(json.loads(body))


@pytest.mark.slow
@RELAXED
@given(DOCUMENTS, st.integers(-5, 100).filter(lambda number: number not in (1, 2)) | st.text(max_size=3) | st.none())
def test_a_format_that_is_not_known_is_refused(document, found):
    value = {**json.loads(document.to_json()), "format": found}
    advice = "newer release" if isinstance(found, int) and found > 1 else "no release has written that"
    with pytest.raises(UnsupportedFormatError, match=f"found {re.escape(repr(found))}; .*{advice}"):
        type(document).from_json(canonical_json(value))


def test_a_key_of_the_wrong_form_is_told_once():
    reference = {"key": "../x", "sha256": DIGEST, "first_shard": 0, "shards": 2}
    with pytest.raises(InvalidDocumentError) as caught:
        Manifest.from_object({**MANIFEST, "index": [reference]})
    message = str(caught.value)
    assert message.count("found") == 1
    assert "index.0.key" in message and "'../x'" in message


@pytest.mark.slow
@RELAXED
@given(st.data(), DOCUMENTS)
def test_a_truncated_document_is_refused(data, document):
    body = document.to_json()
    with pytest.raises(InvalidDocumentError):
        type(document).from_json(body[: data.draw(st.integers(0, len(body) - 1))])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@RELAXED
@given(st.data(), DOCUMENTS, JSON_VALUES)
def test_any_value_in_any_place_is_read_or_refused_in_a_line(data, document, value):
    whole = json.loads(document.to_json())
    place = whole
    while True:
        name = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[name]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        place = inner
    place[name] = value
    try:
        found = type(document).from_json(json.dumps(whole).encode())
        if isinstance(found, VocabularyFile):
            found.pairs()
    except ContractError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 600


@pytest.mark.parametrize("kind", [Manifest, Segment, VocabularyFile, Checkpoints, SourcesFile])
def test_what_is_no_json_object_or_no_utf_8_can_spell_is_refused(kind):
    for body in (b"", b"[]", b"3", b'"x"', b"null", b"{", b"\xff\xfe", b"{]", b"NaN", "{}".encode("utf-16-le")):
        with pytest.raises(InvalidDocumentError, match="expected a JSON object"):
            kind.from_json(body)
    escapes = (b'{"sources": "\\ud800"}', b'{"\\udc00": 1}', b'{"x": [[{"y": "a\\ud83dz"}]]}', b'{"x": "\xed\xa0\x80"}')
    for body in (*escapes, '{"x": "\\ud800"}'.encode("utf-16")):
        with pytest.raises(InvalidDocumentError, match=r"half of a surrogate pair|expected a JSON object"):
            kind.from_json(body)
    for opening in (b"[", b'{"a":'):
        with pytest.raises(InvalidDocumentError):
            kind.from_json(b'{"sources":' + opening * 200_000)
    with pytest.raises(ContractError):
        kind.from_json(b'{"total_shards": ' + b"9" * 10_000 + b"}")


def test_surrogates_byte_order_marks_and_no_nan():
    assert SourcesFile.from_json(b'\xef\xbb\xbf{"sources": []}').sources == ()
    spelled = json.dumps({**MANIFEST, "tokenizer_version": "\N{GRINNING FACE}"}).encode()
    assert b"\\ud83d\\ude00" in spelled
    assert Manifest.from_json(spelled).tokenizer_version == "\N{GRINNING FACE}"
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"x": float("nan")})


@pytest.mark.parametrize("surplus", ["NaN", "-Infinity", "1e999", "[" * 200 + "]" * 200])
def test_escapes_beside_what_cannot_be_spelled_again(surplus):
    """It is in a field that a later revision may add, so it is read over, or refused: never another error."""
    body = json.dumps({**MANIFEST, "tokenizer_version": "\u00fc", "surplus": "X"}).replace('"X"', surplus).encode()
    assert b"\\u00fc" in body
    assert Manifest.from_json(body).tokenizer_version == "\u00fc"
    with pytest.raises(InvalidDocumentError):
        Manifest.from_json(body.replace(b"\\u00fc", b"\\ud800"))


TOTALS = {"shards": 2, "tokens": 20, "documents_processed": 5, "last_shard_id": 1}
HOSTILE: dict[tuple[str | int, ...], list[object]] = {
    ("total_shards",): [-1, 3, 2.0, "2", True, 2**53],
    ("total_tokens",): [21],
    ("total_size_bytes",): [-5],
    ("sequence",): [-1],
    ("previous",): ["abc"],
    ("shard_tokens",): [0, 9, 2**28],
    ("dtype",): ["int32"],
    ("created_at",): ["yesterday", "2026-11-20T17:32:03+01:00"],
    ("sources", "a", "shards"): [-2, 1],
    ("sources", "a", "tokens"): [19],
    ("sources",): [{"../a": TOTALS}],
    ("index", 0, "shards"): [1, 1001, 0],
    ("index", 0, "first_shard"): [1],
    ("index", 0, "sha256"): ["F" * 64, "0" * 63],
    ("index", 0, "key"): ["../index.json", "/etc/passwd"],
    ("index",): [[MANIFEST["index"][0], MANIFEST["index"][0]]],
    ("tokenizer",): [
        {"key": "a/../../b", "sha256": DIGEST, "next_merge_id": 300},
        {"key": "a", "sha256": DIGEST, "next_merge_id": 2**32},
    ],
    ("signature",): [{"algorithm": "none", "key_id": "", "value": ""}],
}


@pytest.mark.parametrize(("place", "value"), [(place, value) for place, values in HOSTILE.items() for value in values])
def test_hostile_manifests_are_refused(place, value):
    assert Manifest.from_json(canonical_json(MANIFEST)).total_shards == 2
    whole = json.loads(canonical_json(MANIFEST))
    inner = whole
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    with pytest.raises(InvalidDocumentError, match=r"manifest\.json"):
        Manifest.from_json(canonical_json(whole))


def test_the_specifications_own_documents_are_read():
    body = b"""{
      "total_shards": 128, "total_tokens": 320000000, "total_size_bytes": 2560000000, "tokenizer_version": "bpe_v1",
      "sources": {"fineweb-edu": {
        "shards": 128, "tokens": 320000000, "documents_processed": 85000, "last_shard_id": 127}},
      "created_at": "2025-12-09T20:00:00Z", "updated_at": "2025-12-09T20:52:00Z"
    }"""
    manifest = Manifest.from_json(body)
    assert (manifest.shard_tokens, manifest.index, manifest.sequence) == (2_500_000, (), 0)
    body = b"""{"fineweb-edu": {
        "documents_processed": 85000, "last_shard_id": 127, "leftover_tokens": [1234, 5678],
        "timestamp": "2025-12-09T20:52:00Z"}}"""
    checkpoints = Checkpoints.from_json(body)
    assert checkpoints.sources["fineweb-edu"].leftover_tokens == (1234, 5678)
    assert json.loads(checkpoints.to_json())["fineweb-edu"]["last_shard_id"] == 127
    manifest = Manifest.from_object({**MANIFEST, "mirrors": ["https://example.org"]})
    assert manifest == Manifest.from_object(MANIFEST)


HOSTILE_FIELDS: dict[str, list[object]] = {
    "tokens": [0, 2**28],
    "first_document": [4],
    "last_document": [-1],
    "source": ["A", "", "a" * 65],
    "sha256": ["x" * 64],
    "packed": [{"key": "packed/../x", "sha256": DIGEST, "size_bytes": 1}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in HOSTILE_FIELDS for value in HOSTILE_FIELDS[name]]
)
def test_hostile_entries_are_refused(name, value):
    Segment.from_object({"shards": [ENTRY]})
    with pytest.raises(InvalidDocumentError, match="index segment"):
        Segment.from_object({"shards": [{**ENTRY, name: value}]})


def test_a_segments_ids_run_on_from_a_thousand():
    for ids in ([], [1], [1000, 1002], [0, 0], [1, 0], list(range(1001))):
        with pytest.raises(InvalidDocumentError):
            Segment.from_object({"shards": [{**ENTRY, "id": number} for number in ids]})


INSIDE = {
    "documents_processed": 3, "last_shard_id": 7, "leftover_tokens": [], "timestamp": TIME,
    "cursor": {"file": "a.parquet", "row": 2}, "partial_document": {"tokens_in_shards": 5, "tokens": 50_000_000},
}  # fmt: skip


def test_a_release_that_knows_no_partial_document_is_kept_from_the_file():
    whole = Checkpoints.from_object({"format": 2, "alpha": INSIDE})
    assert whole.sources["alpha"].tokens_left_over == 49_999_995
    assert json.loads(whole.to_json())["format"] == 2
    assert Checkpoints.from_json(whole.to_json()) == whole
    behind = whole.sources["alpha"].model_copy(update={"partial_document": None})
    assert json.loads(whole.model_copy(update={"sources": {"alpha": behind}}).to_json())["format"] == 1
    with pytest.raises(UnsupportedFormatError):
        Checkpoints.from_object({"format": 3, "alpha": INSIDE})


@pytest.mark.parametrize(
    "change",
    [
        {"cursor": None},
        {"leftover_tokens": [40, 2]},
        {"partial_document": {"tokens_in_shards": 50, "tokens": 50}},
        {"partial_document": {"tokens_in_shards": 0, "tokens": 50}},
        {"partial_document": {"tokens_in_shards": 5, "tokens": 50, "version": 2}},
    ],
)
def test_a_partial_document_that_makes_no_sense_is_refused(change):
    with pytest.raises(InvalidDocumentError, match="partial_document"):
        Checkpoints.from_object({"format": 2, "alpha": {**INSIDE, **change}})


@pytest.mark.parametrize("name", ["format", "writer", "manifest"])
def test_a_source_may_not_take_a_reserved_name(name):
    position = {"documents_processed": 0, "last_shard_id": -1, "leftover_tokens": [], "timestamp": TIME}
    whole = Checkpoints.from_object({"alpha": position})
    with pytest.raises(InvalidDocumentError, match="may not be called"):
        whole.model_copy(update={"sources": {name: whole.sources["alpha"]}}).to_json()


def test_the_built_in_sources_are_the_specifications_and_none_is_named_twice():
    sources = builtin_sources()
    assert [spec.name for spec in sources.enabled()] == ["fineweb-edu", "fineweb", "redpajama", "slimpajama", "c4"]
    assert sum(spec.merges for spec in sources.sources) == 31_734
    assert sources.get("c4") in sources.sources
    assert sources.get("nothing") is None
    with pytest.raises(InvalidDocumentError, match="named twice"):
        SourcesFile.from_object({"sources": [{"name": "a"}, {"name": "a"}]})


@given(st.datetimes(datetime(1970, 1, 1), datetime(2999, 1, 1), timezones=st.just(UTC)))
def test_times_are_whole_seconds_of_utc(moment):
    assert parse_time(format_time(moment)) == moment.replace(microsecond=0)


@pytest.mark.parametrize("text", ["", "2026-11-20", "2026-11-20T17:32:03", "2026-13-20T17:32:03Z", "1e9"])
def test_other_spellings_of_times_are_refused(text):
    with pytest.raises(InvalidDocumentError, match="expected a time"):
        parse_time(text)
