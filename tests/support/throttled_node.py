"""``python -m trainer`` at a pace of its own: each inner step takes as long as it is told, or longer.

Run as ``python -m tests.support.throttled_node STEP_S FOLDER ARGUMENTS``. For each round that it holds, its folder gets
the state's anchor, and one line: when that was, in which round, and how many batches of its own were in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.inner import InnerLoop
from trainer.outer.diloco import DiLoCoTrainer


def main() -> int:
    step_s, folder = float(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    step: Callable[..., Any] = InnerLoop.step
    after: Callable[..., Any] = DiLoCoTrainer.after_inner_step

    def paced(self: InnerLoop) -> Any:
        until_s = time.monotonic() + step_s
        result = step(self)
        time.sleep(max(0.0, until_s - time.monotonic()))
        _write(folder, {"kind": "step", "at_s": time.time(), "tokens": result.num_tokens})
        return result

    def recorded(self: DiLoCoTrainer, num_batches: int = 1) -> Any:
        outcome = after(self, num_batches)
        if outcome is not None:
            found = {"kind": "round", "at_s": time.time(), "round": outcome.round_index, "ok": outcome.committed}
            found |= {"batches": outcome.num_batches, "waited_s": outcome.waited_s, "digest": self.state_digest()}
            if outcome.report is not None:
                found["weights"] = dict(zip(outcome.report.members, outcome.report.weights, strict=False))
                found["seconds"] = outcome.report.phases
            _write(folder, found)
            if outcome.committed:
                held = {"anchor": self.shared_state().anchor, "names": list(self.plan.whole().names)}
                torch.save(held, folder / f"anchor-{self.round_index}.pt")
        return outcome

    InnerLoop.step = paced  # type: ignore[method-assign]
    DiLoCoTrainer.after_inner_step = recorded  # type: ignore[method-assign]
    from trainer.run.cli.app import run

    return run(sys.argv[3:])


def _write(folder: Path, line: dict[str, Any]) -> None:
    with (folder / "rounds.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
