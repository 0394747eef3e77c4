"""``python -m genesis`` is ``genesis``."""

from __future__ import annotations

from genesis.cli import main

if __name__ == "__main__":
    main()
