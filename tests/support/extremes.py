"""Hypothesis strategies for what only a liar sends: JSON with extreme numbers in a document that was valid."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
"""The same ones in every run."""

_BORDERS = sorted(
    sign * (2**power + delta)
    for power in (7, 8, 15, 16, 31, 32, 47, 48, 53, 62, 63, 64, 128)
    for delta in (-1, 0, 1)
    for sign in (1, -1)
)
INTEGERS = st.sampled_from([0, -1, 1, *_BORDERS]) | st.integers(-(2**130), 2**130)
"""Of any size, mostly beside a border."""
NUMBERS = INTEGERS | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([1e308, 5e-324, -0.0])
SHAPES = st.lists(st.sampled_from([0, 0, 1, 2, 3, 2**24, 2**31, 2**47, 2**48 - 1]) | st.integers(0, 2**49), max_size=6)
_CONTAINERS = st.lists(NUMBERS, max_size=3) | st.dictionaries(st.text(max_size=4), NUMBERS, max_size=2)
_VALUES = NUMBERS | st.none() | st.booleans() | st.text(max_size=8) | _CONTAINERS


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """``document`` with some of its values, wherever they are, replaced, left out, repeated or added to."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(result))
        if not places:
            return draw(_VALUES)
        container, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if what == "replace":
            container[key] = draw(_VALUES)
        elif what == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        else:
            container[draw(st.text(max_size=4))] = draw(_VALUES)
    return result


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(result)))
        what = draw(st.sampled_from(["replace", "replace", "cut", "insert"]))
        if what == "cut":
            del result[at:]
        else:
            new = draw(st.binary(max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)]))
            result[at : at + (len(new) if what == "replace" else 0)] = new
    return bytes(result)


def outcome(promised: type[Exception] | tuple[type[Exception], ...], decode: Callable[..., Any], *given: Any) -> Any:
    """What ``decode`` makes of it; None where it raises what it promises. All else goes on from here."""
    try:
        return decode(*given)
    except promised:
        return None


def _places(value: Any) -> Any:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(children):
        yield value, key
        yield from _places(child)
