"""JSON that has one reading only.

Two parsers that disagree about a message are a way to have it signed as one thing and obeyed as another. So what
parsers are known to disagree on is refused: repeated keys, NaN and infinities (also spelled 1e999), bytes that are not
UTF-8, half surrogate pairs, integers that do not fit 64 bits, and nesting deeper than any message of this protocol.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

__all__ = ["MAX_DEPTH", "parse_strict_json"]

MAX_DEPTH: Final = 32

_MAX_INTEGER_DIGITS = 19


def parse_strict_json(data: bytes) -> dict[str, Any]:
    """Parses one JSON object.

    Args:
        data: UTF-8 text; its size has been bounded before, and bounds what is built here (some 30 bytes a byte).

    Raises:
        ValueError: it is not one, or it is spelled in a way that can be read in two.
    """
    text = data.decode("utf-8")
    _check_depth(text)
    value = _DECODER.decode(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")  # noqa: TRY004
    if "\\u" in text:
        # Escapes can spell half surrogate pairs, which UTF-8 cannot: writing finds them (UnicodeEncodeError).
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_depth(text: str) -> None:
    """Bounds the nesting before the parser recurses; few brackets of any kind, as in most messages, are enough."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    in_string = False
    for token in re.finditer(r'\\.|["\[\]{}]', text):
        char = token.group()
        if char == '"':
            in_string = not in_string
        elif not in_string and char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"expected at most {MAX_DEPTH} levels of nesting, found more")
        elif not in_string and char in "]}":
            depth -= 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("expected each key once, found one repeated")
    return result


def _constant(name: str) -> Any:
    raise ValueError(f"expected finite numbers, found {name}")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"expected finite numbers, found {text[:24]}")
    return value


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"expected integers of at most {_MAX_INTEGER_DIGITS} digits, found one of {len(text)}")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer)
