"""Conditional requests."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.serve.preconditions import Precondition, evaluate, range_applies

ETAG = '"a-b-c"'
AT_S = 1_700_000_000
BEFORE, SAME, AFTER = (formatdate(AT_S + shift, usegmt=True) for shift in (-1, 0, 1))


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({}, Precondition.SEND),
        ({"if-none-match": ETAG}, Precondition.NOT_MODIFIED),
        ({"if-none-match": f"W/{ETAG}"}, Precondition.NOT_MODIFIED),
        ({"if-none-match": f'"x", W/"y" ,{ETAG}'}, Precondition.NOT_MODIFIED),
        ({"if-none-match": "*"}, Precondition.NOT_MODIFIED),
        ({"if-none-match": '"x"'}, Precondition.SEND),
        ({"if-none-match": "a-b-c"}, Precondition.SEND),
        ({"if-none-match": '"x"', "if-modified-since": SAME}, Precondition.SEND),
        ({"if-modified-since": BEFORE}, Precondition.SEND),
        ({"if-modified-since": SAME}, Precondition.NOT_MODIFIED),
        ({"if-modified-since": AFTER}, Precondition.NOT_MODIFIED),
        ({"if-modified-since": "yesterday"}, Precondition.SEND),
        ({"if-match": ETAG}, Precondition.SEND),
        ({"if-match": "*"}, Precondition.SEND),
        ({"if-match": f"W/{ETAG}"}, Precondition.FAILED),
        ({"if-match": '"x"'}, Precondition.FAILED),
        ({"if-match": '"x"', "if-none-match": ETAG}, Precondition.FAILED),
        ({"if-match": ETAG, "if-unmodified-since": BEFORE}, Precondition.SEND),
        ({"if-unmodified-since": BEFORE}, Precondition.FAILED),
        ({"if-unmodified-since": SAME}, Precondition.SEND),
        ({"if-unmodified-since": SAME, "if-none-match": ETAG}, Precondition.NOT_MODIFIED),
        ({"if-unmodified-since": "1 Jan 99999999999 00:00:00 GMT"}, Precondition.SEND),
    ],
)
def test_the_order_of_the_rfc(headers, outcome):
    assert evaluate(headers, ETAG, AT_S) is outcome


@pytest.mark.parametrize(
    ("if_range", "applies"),
    [
        (None, True),
        (ETAG, True),
        (f"W/{ETAG}", False),
        ('"x"', False),
        (SAME, True),
        (BEFORE, False),
        (AFTER, False),
        ("nonsense", False),
        ("", False),
    ],
)
def test_if_range(if_range, applies):
    assert range_applies(if_range, ETAG, AT_S, now_s=AT_S + 3600) is applies


def test_a_time_that_is_too_young_vouches_for_nothing():
    assert not range_applies(SAME, ETAG, AT_S, now_s=AT_S + 1)


@given(st.text(max_size=60))
def test_no_header_breaks_it(text):
    for name in ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since"):
        assert evaluate({name: text}, ETAG, AT_S) in Precondition
    assert range_applies(text, ETAG, AT_S, now_s=AT_S) in (True, False)
