"""The page's own files."""

from __future__ import annotations

from typing import Final

from genesis.pages import Asset, Page

_PACKAGE = "genesis.store_page"

STORE_PAGE: Final = Page(
    template=Asset(_PACKAGE, "static/store.html"),
    stylesheets=(Asset(_PACKAGE, "static/store.css"),),
    modules=(
        Asset(_PACKAGE, "static/store_data.js"),
        Asset(_PACKAGE, "static/store_overview.js"),
        Asset(_PACKAGE, "static/store_shards.js"),
        Asset(_PACKAGE, "static/store_documents.js"),
        Asset(_PACKAGE, "static/store_vocabulary.js"),
        Asset(_PACKAGE, "static/store.js"),
    ),
)
