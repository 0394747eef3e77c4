"""Tasks of EleutherAI's lm-evaluation-harness on a model exported to Hugging Face's form.

The harness is optional (extra ``eval``) and loads the export as any other model, so its figures can be held against
published ones. What a task needs it fetches itself, from the Hub; tasks of one's own are YAML files in a folder.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.errors import TrainerError, TrainerUsageError

Scores = dict[str, dict[str, float]]
"""Metrics by name, such as ``acc`` and ``acc_stderr``, by task."""


def require_harness() -> None:
    """Raises ModuleNotFoundError, which names the module, if the harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")


def run_tasks(
    folder: Path,
    tasks: Sequence[str],
    device: torch.device,
    *,
    tasks_dir: Path | None = None,
    limit: int = 0,
    batch_size: int = 8,
) -> Scores:
    """Returns the scores of a Hugging Face model folder in some tasks.

    Args:
        folder: the export.
        tasks: their names, as ``lm-eval ls tasks`` lists them, or as the files in ``tasks_dir`` say.
        device: where the model runs.
        tasks_dir: a folder of further task definitions.
        limit: examples of each task; 0: all.
        batch_size: examples that go through the model at once.

    Raises:
        TrainerUsageError: there is no such task.
        TrainerError: a task's data or code cannot be used.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks_dir) if tasks_dir is not None else None)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise TrainerUsageError(
            f"--tasks: expected names that the harness knows (`lm-eval ls tasks`), found {', '.join(unknown)}; "
            "--tasks-dir names a folder of further ones"
        )
    try:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "auto"},
            tasks=list(tasks),
            task_manager=manager,
            device=str(device),
            batch_size=batch_size,
            limit=limit or None,
        )
    except Exception as error:  # Tasks bring code and data of their own, which raise anything.
        first = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise TrainerError(f"the harness could not run {', '.join(tasks)}: {type(error).__name__}: {first}") from error
    return scores_of(found["results"])


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> Scores:
    """Returns the finite numbers among a harness's results; ``acc,none`` is ``acc``, as no filter changed it."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        for task, metrics in results.items()
    }
