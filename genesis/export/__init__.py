"""A store's token shards in the forms of other libraries: Megatron, MosaicML Streaming, datatrove, numpy.

`export_shards` is the whole of it: verified reading, documents joined across shards, files that appear whole or not at
all, and a run that goes on where it was killed. `genesis.sources.token_files` reads two of these forms back.
"""

from __future__ import annotations

from genesis.export.options import ExportFormat, ExportOptions
from genesis.export.record import RECORD_NAME, ExportRecord
from genesis.export.run import ExportResult, export_shards

__all__ = ["RECORD_NAME", "ExportFormat", "ExportOptions", "ExportRecord", "ExportResult", "export_shards"]
