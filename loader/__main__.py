"""``python -m loader``: a training node's shards planned, fetched, verified and measured."""

from __future__ import annotations

from loader.cli import main

if __name__ == "__main__":
    main()
