"""JSON with one reading only."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.network.rpc import parse_strict_json

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), _JSON), st.booleans())
def test_what_json_writes_is_read_as_it_was(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_strict_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":1}',
        '{"a":{"b":1,"b":2}}',
        '{"a":NaN}',
        '{"a":Infinity}',
        '{"a":-Infinity}',
        '{"a":1e999}',
        '{"a":' + "9" * 20 + "}",
        '{"a":' + "9" * 5000 + "}",
        '{"a":"\\ud800"}',
        '{"a":["\\udc00"]}',
        '{"\\ud800":1}',
        '{"a":' + "[" * 40 + "]" * 40 + "}",
        '{"a":' + "[" * 30000,
        '{"a":' * 8000,
        "[]",
        "1",
        '"text"',
        "null",
        "",
        "{",
        "{}x",
        "{'a':1}",
        '{"a":"\x00"}',
    ],
)
def test_what_parsers_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_strict_json(text.encode())


@pytest.mark.parametrize(
    "data", [b"\xff\xfe{\x00}\x00", b'{"a":"\xff"}', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16")]
)
def test_only_utf_8_is_read(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_strict_json(data)


def test_brackets_inside_strings_do_not_count_as_depth() -> None:
    text = '{"a":"' + '[{\\"' * 100 + '"}'
    assert parse_strict_json(text.encode()) == {"a": '[{"' * 100}


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(parse_strict_json(data), dict)
