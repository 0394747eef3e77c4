"""How the account stood when its keeper ended: what no driver had begun is handed back, and nothing is under way.

The keeper writes it into a file beside the journal, which nobody reads but people and `swarm up`: what a driver last
answered over HTTP is from before it settled.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from trainer.monitor.pipeline import SwarmAccount
from trainer.run.config import RunConfig

__all__ = ["ledger_folder", "read_last_account", "write_last_account"]

logger = logging.getLogger(__name__)

_NAME = "last_account.json"
_MAX_BYTES = 8 << 20


def ledger_folder(config: RunConfig) -> Path:
    """Where a run's keeper has its journal."""
    return Path(config.state_dir).expanduser() / "ledger" / config.run_id


def write_last_account(config: RunConfig, account: SwarmAccount) -> None:
    """Leaves it for others; a disk that is full is no reason to end otherwise than in order."""
    path = ledger_folder(config) / _NAME
    temporary = path.with_name(f".{_NAME}.tmp")
    try:
        temporary.write_text(account.model_dump_json(), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("%s: how the account stands in the end could not be written: %s", path, error)


def read_last_account(config: RunConfig, since: float) -> SwarmAccount | None:
    """As the keeper left it; None: it has not ended in order since then.

    Args:
        config: of the run.
        since: seconds since 1970.
    """
    path = ledger_folder(config) / _NAME
    try:
        found = path.stat()
        if found.st_mtime < since or found.st_size > _MAX_BYTES:
            return None
        return SwarmAccount.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        logger.debug("%s: %s", path, error)
        return None
