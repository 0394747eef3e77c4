"""Pages for a browser: files of the packages, sent under a strict policy, or put into one file with their data.

A `Page` is a template, stylesheets and modules, all of them resources of Genesis' packages: a name of a request is
looked up in a table made at the start and never becomes a path. It goes out in two ways. Served, the browser may load
what this server gives and nothing else, and the page asks the server's JSON routes again and again. As one file
(`single_file`), style, modules and data stand in it, so that it can be mailed, kept or put on a CDN; its policy names
each of them by its sha256 and lets it ask for nothing at all. ``static/`` has what all pages look like (``page.css``)
and are built with (``dom.js``): text of strangers becomes text nodes, cut, and with its control and direction marks
shown.

The trade-off: no build step and no framework, so modules keep to the few forms of ``import`` and ``export`` that
`bundle` understands, and a page's files are read at the start of a process (60 kB, 3 ms) instead of when asked for.
"""

from __future__ import annotations

from genesis.pages.bundle import bundle
from genesis.pages.page import Asset, Page, page_routes
from genesis.pages.pdf import find_browser, print_pdf
from genesis.pages.single_file import PAGE_DATA_LIMIT_BYTES, data_script, single_file

__all__ = [
    "PAGE_DATA_LIMIT_BYTES",
    "Asset",
    "Page",
    "bundle",
    "data_script",
    "find_browser",
    "page_routes",
    "print_pdf",
    "single_file",
]
