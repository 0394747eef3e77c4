"""What `swarm up` says when all has ended: how far the run is, where its things are, and how to get a model of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.run.config import RunConfig

__all__ = ["ending_texts"]


def ending_texts(config: RunConfig, run: Path, logs: Path, began_at: float, store: str) -> Iterator[str]:
    """A line each.

    Args:
        config: of the run.
        run: its file.
        logs: folder of the processes' logs.
        began_at: when the processes were started, seconds since 1970.
        store: where the shards are, if the run file does not say that; else empty.
    """
    from trainer.checkpoint.stages.naming import named_files
    from trainer.model.config import stage_names
    from trainer.run.cli.swarm_lines import settled_text
    from trainer.run.swarm.keeper import read_last_account
    from trainer.run.swarm.shape import target_tokens_of

    account = read_last_account(config, began_at)
    if account is None:
        yield "in the end: the keeper of the account did not end in order; what was heard of it last is above"
    else:
        yield f"in the end: {settled_text(account, account.trained_tokens // target_tokens_of(config))}"
    folder = Path(config.swarm.checkpoint.directory).expanduser()
    stages = stage_names(config.swarm.num_stages)
    saved = {found.stage for found in named_files(folder, config.run_id)}
    missing = [stage for stage in stages if stage not in saved]
    none_of = f", none of {', '.join(missing)}" if missing else ""
    yield f"checkpoints are in {folder / config.run_id}{none_of}; logs are in {logs}"
    if not missing:
        words = ["python", "-m", "trainer", "export", "--run", str(run), "--at", "now", "--to", "hf"]
        words += ["--checkpoint-dir", str(folder), *(["--store", store] if store else [])]
        yield f"for one model of the stages: {shlex.join(words)} DIR"
