"""The populator: web text in, a vocabulary and token shards in an object store out.

Rooms: `genesis.sources` reads text, `genesis.tokenizer` learns and encodes, `genesis.store` keeps objects,
`genesis.populate` runs the pipeline and commits, `genesis.cli` is the command line.
"""

from __future__ import annotations

from genesis.errors import GenesisError

__all__ = ["GenesisError", "__version__"]

__version__ = "0.1.0"
