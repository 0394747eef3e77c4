"""Texts of strangers on their way to the page: cut to a length, without what turns or hides the text beside them.

The page's own script shows control and direction marks as signs too (genesis/pages/static/dom.js); here it is done for
the HTML that the server writes, and so that the JSON stays small and can be written at all: a lone surrogate cannot.
"""

from __future__ import annotations

import re
from typing import Final

NAME: Final = 64
LINE: Final = 300

_HIDDEN = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb"
    "\\ud800-\\udfff\\U000e0000-\\U000e0fff]"
)


def harmless(text: str, limit: int = LINE) -> str:
    """Returns at most ``limit`` characters of a text (and an ellipsis), hidden ones as ``⟨U+202E⟩``."""
    shown = text if len(text) <= limit else f"{text[:limit]}…"
    return _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", shown)
