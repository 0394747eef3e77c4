"""Conditional requests."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.serve.preconditions import Outcome, evaluate, range_applies

ETAG = '"a-b-c"'
AT_S = 1_700_000_000
BEFORE, SAME, AFTER = (formatdate(AT_S + shift, usegmt=True) for shift in (-1, 0, 1))


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        ({}, Outcome.SEND),
        ({"if-none-match": ETAG}, Outcome.NOT_MODIFIED),
        ({"if-none-match": f"W/{ETAG}"}, Outcome.NOT_MODIFIED),
        ({"if-none-match": f'"x", W/"y" ,{ETAG}'}, Outcome.NOT_MODIFIED),
        ({"if-none-match": "*"}, Outcome.NOT_MODIFIED),
        ({"if-none-match": '"x"'}, Outcome.SEND),
        ({"if-none-match": "a-b-c"}, Outcome.SEND),
        ({"if-none-match": '"x"', "if-modified-since": SAME}, Outcome.SEND),
        ({"if-modified-since": BEFORE}, Outcome.SEND),
        ({"if-modified-since": SAME}, Outcome.NOT_MODIFIED),
        ({"if-modified-since": AFTER}, Outcome.NOT_MODIFIED),
        ({"if-modified-since": "yesterday"}, Outcome.SEND),
        ({"if-match": ETAG}, Outcome.SEND),
        ({"if-match": "*"}, Outcome.SEND),
        ({"if-match": f"W/{ETAG}"}, Outcome.FAILED),
        ({"if-match": '"x"'}, Outcome.FAILED),
        ({"if-match": '"x"', "if-none-match": ETAG}, Outcome.FAILED),
        ({"if-match": ETAG, "if-unmodified-since": BEFORE}, Outcome.SEND),
        ({"if-unmodified-since": BEFORE}, Outcome.FAILED),
        ({"if-unmodified-since": SAME}, Outcome.SEND),
        ({"if-unmodified-since": SAME, "if-none-match": ETAG}, Outcome.NOT_MODIFIED),
        ({"if-unmodified-since": "1 Jan 99999999999 00:00:00 GMT"}, Outcome.SEND),
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
        assert evaluate({name: text}, ETAG, AT_S) in Outcome
    assert range_applies(text, ETAG, AT_S, now_s=AT_S) in (True, False)
