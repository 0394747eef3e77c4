"""A report as a page: one HTML file with its data, style and scripts inside, drawn by the modules of the live page.

With plotly (the extra ``page``) the file has 5 MB of charts and zooms as the live page does; without it the same
figures stand in tables, and the file is small. It asks nobody for anything, whoever opens it
(`genesis.pages.single_file`).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Final

from genesis.pages import Asset, Page, single_file
from trainer.monitor.pages.routes import CHART_SCRIPTS, STYLES, has_charts
from trainer.monitor.report.model import RunReport

_PACKAGE: Final = "trainer.monitor.report"
_DRAWING: Final = (
    Asset("trainer.monitor.pages", "static/charts.js"),
    Asset("trainer.monitor.pages", "static/rounds.js"),
)


@lru_cache(maxsize=1)
def report_page() -> Page:
    """Returns the page's files."""
    return Page(
        template=Asset(_PACKAGE, "static/report.html"),
        modules=(*_DRAWING, Asset(_PACKAGE, "static/timeline.js"), Asset(_PACKAGE, "static/report.js")),
        stylesheets=(*STYLES, Asset(_PACKAGE, "static/report.css")),
        classic_scripts=CHART_SCRIPTS if has_charts() else (),
    )


def report_html(report: RunReport) -> str:
    """Returns the report as one HTML file. Raises `genesis.errors.UsageError`: it is too large for one."""
    data = json.loads(report.model_dump_json())  # Not model_dump(), which keeps NaN.
    return single_file(report_page(), data, title=f"{report.title}: report on a run")
