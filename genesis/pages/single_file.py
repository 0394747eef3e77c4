"""A page and its data as one HTML file that asks nobody for anything.

Its policy stands in a <meta>: nothing may be loaded, and only the styles and scripts whose sha256 it names may run. The
data is JSON in a script element that is no script; what could end that element, or a line of JavaScript, is spelt as
an escape. So whatever a stranger put into the data stays a string.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any, Final

from genesis.errors import UsageError
from genesis.pages.bundle import bundle
from genesis.pages.page import DOM_JS, Page

PAGE_DATA_LIMIT_BYTES: Final = 64 << 20
"""More in one file makes browsers slow and mail impossible."""
_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
_END_OF_SCRIPT: Final = re.compile(r"<(?=/script|!--|script)", re.IGNORECASE)


def single_file(page: Page, data: Any, *, title: str | None = None) -> str:
    """The page with its styles, modules and data inside.

    Args:
        page: which.
        data: what JSON can hold; `embeddedData` of dom.js returns it.
        title: the document's; by default the template's.

    Raises:
        UsageError: the data is too large for a page.
        ValueError: the data holds NaN or an infinity.
    """
    style = "\n".join(page.texts[name] for name in page.style_names)
    if "</style" in style.lower():
        raise ValueError("expected stylesheets without '</style'")
    libraries = [_inline(page.texts[asset.name]) for asset in page.classic_scripts]
    names = [DOM_JS.name, *(asset.name for asset in page.modules)]
    own = _inline(bundle({name: page.texts[name] for name in names}, page.entry))
    # A classic script that stands in the head runs before the body is there: the page's own waits for it.
    own = f"document.addEventListener('DOMContentLoaded', () => {{\n{own}\n}});"
    scripts = [*libraries, own]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_source, scripts))}; style-src {_source(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="referrer" content="no-referrer">',
        f"<style>{style}</style>",
        data_script(data),
        *(f"<script>{script}</script>" for script in scripts),
    ]
    return page.document("\n".join(head), title)


def data_script(data: Any) -> str:
    """The data as an element that is read by `embeddedData`; see `single_file`."""
    body = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    # A string may hold a lone surrogate, which is no UTF-8: it becomes an escape, as JSON has it.
    body = re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", body)
    size_bytes = len(body.encode())
    if size_bytes > PAGE_DATA_LIMIT_BYTES:
        raise UsageError(
            f"expected at most {PAGE_DATA_LIMIT_BYTES >> 20} MiB of data in one page, found {size_bytes >> 20}; "
            "ask for less"
        )
    return f'<script type="application/json" id="page-data">{body}</script>'


def _inline(script: str) -> str:
    """Without what would end or change the element it stands in (inside strings and patterns, the only places)."""
    return _END_OF_SCRIPT.sub(r"\\x3c", script)


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
