"""A report on a run: what its logs tell, as typed values, and as one HTML file to mail or keep.

    inputs.py → node_record.py, rounds.py, incidents.py, watched.py → building.py: `run_report(paths) -> RunReport`
    page.py: the report as a page with its data inside, drawn by the modules of the live page

Guarantees: logs are only read, one line at a time, and may be cut in mid-line, of any release, and of anybody: texts
are cut and harmless, figures finite, lists bounded. Memory does not grow with the number of steps. The trade-off: of
more than 4,096 steps a curve shows means, lows and highs of some together; a million steps take 25 s on one core.
"""

from __future__ import annotations

from trainer.monitor.report.building import run_report
from trainer.monitor.report.model import RunReport

__all__ = ["RunReport", "run_report"]
