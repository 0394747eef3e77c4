"""A pipeline as its users start it: workers and drivers as processes of their own, on this machine.

    with PipelineSwarm(tmp_path, swarm={"driver": {"synchronous": True}}) as swarm:
        swarm.begin_driver("driver-1", "--max-steps", "20")
        swarm.begin_workers("head", "body-1", "tail")
        swarm["driver-1"].exit_code()

What `TrainingSwarm` guarantees holds here too.
"""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from loader import GenesisDataset
from scripts.swarm_bench.disturbing import is_at_work
from tests.support.training_swarm import TERMINATED, WAIT_S, TrainingNode, TrainingSwarm, merged
from trainer.checkpoint.stages import StageSet, assemble, newest_set, parse_time, time_us
from trainer.model import Transformer
from trainer.monitor import SwarmAccount, SwarmStages
from trainer.run.config import RunConfig, from_mapping, read_yaml

STAGES = ("head", "body-1", "tail")
DRIVERS = ("driver-1", "driver-2")

SETTINGS: dict[str, Any] = {
    "run_id": "pipeline",
    "strategy": "async_sparta",
    "inner": {"precision": "fp32", "compile": "off", "warmup_steps": 5},
    "data": {"plateau": "off", "holdout": 0},
    "discovery": {"announce_interval_s": 0.5, "announcement_lifetime_s": 8.0, "poll_interval_s": 0.2},
    "swarm": {
        "num_stages": len(STAGES),
        "stage": {"target_tokens": 256, "clip_factor": float("inf"), "tail_clip_factor": float("inf")},
        "worker": {"progress_interval_s": 0.2},
        "driver": {
            "refresh_s": 0.1,
            "request_timeout_s": 20.0,
            "unclear_s": 10.0,
            "ban_s": 1.0,
            "max_ban_s": 8.0,
            "drain_s": 10.0,
        },
        "ledger": {"worker_gone_s": 20.0},
        "checkpoint": {"interval_s": 600.0},
        "join": {"first_peers_s": 1.5, "idle_s": 4.0, "leave_s": 10.0},
    },
}
"""Over those of `TrainingSwarm`: four micro-batches of 2 × 32 tokens a step, and nobody waited for long."""


class PipelineSwarm(TrainingSwarm):
    """The workers and drivers of one run; ``options`` are over `SETTINGS`, by section and name, however deep."""

    def __init__(self, folder: Path, store: Path | None = None, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        placed = merged(SETTINGS, {"swarm": {"checkpoint": {"directory": str(folder / "stages")}}})
        super().__init__(folder, store, **merged(placed, options))

    @property
    def run_file(self) -> Path:
        return self._config

    @property
    def config(self) -> RunConfig:
        return from_mapping(RunConfig, read_yaml(self.run_file))

    @property
    def journal(self) -> Path:
        """Of the account; its keeper must have ended."""
        return self.folder / "home" / "ledger" / self.config.run_id / "journal.jsonl"

    def begin_driver(self, name: str = "driver-1", *options: str) -> TrainingNode:
        self.begin(name, options=["--pipeline", "swarm", "--json", *options])
        return self[name]

    def begin_worker(self, name: str, stage: str, options: Sequence[str] = ()) -> TrainingNode:
        self.begin(name, options=options, program=("-m", "trainer", "worker", "--stage", stage))
        return self[name]

    def begin_workers(self, *stages: str, suffix: str = "", options: Sequence[str] = ()) -> list[TrainingNode]:
        return [self.begin_worker(stage + suffix, stage, options) for stage in stages]

    def begin_two_of_each(self) -> dict[str, TrainingNode]:
        """Starts two drivers and ``STAGE.1``, ``STAGE.2`` of each stage; the workers, once all are at work."""
        for name in DRIVERS:
            self.begin_driver(name)
        workers = [self.begin_worker(f"{stage}.{number}", stage) for stage in STAGES for number in (1, 2)]
        self.wait(lambda: all(is_at_work(node.output()) for node in workers), "all workers at work", 4 * WAIT_S)
        return {node.name: node for node in workers}

    def stop_in_order(self, *workers: str, drivers: Sequence[str] = ("driver-1",)) -> None:
        """Drivers first, so that they have somebody to finish with; all save, and nobody has a traceback."""
        for names in (*([name] for name in drivers), workers or STAGES):
            assert self.stop(*names) == [TERMINATED] * len(names)
        assert all("Traceback" not in node.output() for node in self.nodes.values())

    def begin_again(self, name: str, *options: str) -> TrainingNode:
        command = self.nodes[name].command
        again = TrainingNode(name, [*command, *options], self.folder)
        self.nodes[name] = again
        again.start()
        return again

    def wait_for_steps(
        self, name: str, count: int, timeout_s: float = WAIT_S, alive: Iterable[TrainingNode] | None = None
    ) -> None:
        self.wait(lambda: len(steps_of(self[name])) >= count, f"{count} steps of {name}", timeout_s, alive)

    def account(self, name: str = "driver-1") -> SwarmAccount | None:
        """As a driver tells it over HTTP; None: it does not know yet."""
        answer = self._asked(name, "/api/swarm/account")
        return None if answer is None else SwarmAccount.model_validate(answer)

    def stages(self, name: str = "driver-1") -> SwarmStages | None:
        answer = self._asked(name, "/api/swarm/stages")
        return None if answer is None else SwarmStages.model_validate(answer)

    def checkpoints(self) -> StageSet:
        config = self.config
        return newest_set(config.swarm.checkpoint.directory, config.run_id, parse_time("now", 1 << 62))

    def _asked(self, name: str, path: str) -> dict[str, Any] | None:
        try:
            return self[name].api(path)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return None


def steps_of(driver: TrainingNode) -> list[dict[str, Any]]:
    lines = [line for line in driver.output().splitlines() if line.startswith('{"kind":"step"')]
    return [json.loads(line) for line in lines if line.endswith("}")]


def held_out_rows(swarm: PipelineSwarm, num_rows: int) -> torch.Tensor:
    """[num_rows, seq_len + 1] ids of the shards that the run leaves out (`data.holdout`)."""
    data, length = swarm.config.data, swarm.config.inner.seq_len + 1
    dataset = GenesisDataset(
        data.store, "reader", seq_len=length, batch_size=num_rows, holdout=data.holdout, split="holdout", plateau="off"
    )
    return next(iter(dataset))["input_ids"]


def held_out_loss(swarm: PipelineSwarm, rows: torch.Tensor, at_s: float | None = None) -> float:
    """Mean loss on rows [n, seq_len + 1] of the model that an export of a moment has; of now, if none is named."""
    config = swarm.config
    at_us = time_us(time.time() if at_s is None else at_s)
    whole = assemble(newest_set(config.swarm.checkpoint.directory, config.run_id, at_us))
    model = Transformer(whole.config)
    model.load_state_dict(dict(whole.state))
    model.eval()
    with torch.no_grad():
        losses = [
            functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            for part in rows.split(64)
        ]
    return float(torch.stack(losses).sum()) / rows[:, 1:].numel()
