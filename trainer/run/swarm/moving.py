"""A worker's own look at whether to move: the rule of `rebalancing` with what this process knows of run and machine.

What a stage takes is known by its operations, what moving costs by how long this worker took to join, and by the
stage's size and `swarm.rebalance.link_bytes_per_s`. Where nobody serves a stage its state is nowhere to be had: a
worker goes there only with a checkpoint of it on this machine, or while no stage has stepped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainer.checkpoint.stages.naming import named_files
from trainer.model.sizing import layer_parameters, stage_flops_per_token
from trainer.network.discovery.stage_report import StageReport
from trainer.run.config import RunConfig
from trainer.run.swarm.rebalancing import Move, Rebalancer, placed_workers
from trainer.run.swarm.shape import SwarmShape

_EVERY_S: Final = 2.0
_PUT_OFF_S: Final = 60.0
_BYTES_PER_PARAMETER: Final = 12  # Weights and two moments, in fp32.


class StageMoves:
    """Asks the rule now and then; for the main thread of a worker of ``stage``."""

    def __init__(self, config: RunConfig, shape: SwarmShape, stage: str, key: str) -> None:
        plan = shape.plan
        # Where a DHT is partitioned a worker hears of the stages beside its own only.
        names = plan.around(stage) if config.discovery.partition_by_stage else plan.names
        seq_len = config.inner.seq_len
        self._config = config
        self._sizes = {name: _stage_bytes(shape, name) for name in names}
        self._stage = stage
        self._took_s: float | None = None
        self._has_stepped = True
        self._looked_s = float("-inf")
        self._rule = Rebalancer(
            config.swarm.rebalance,
            key,
            stage,
            names,
            {
                name: stage_flops_per_token(
                    shape.model, plan.ranges[plan.index(name)], has_output=name == plan.names[-1], seq_len=seq_len
                )
                for name in names
            },
            self._move_s,
            self._may_begin,
            spread_s=2 * config.discovery.announce_interval_s,
        )

    def serves(self, now_s: float, took_s: float) -> None:
        """Notes that the worker serves from now on, and how long joining took; the first time since it began counts."""
        if self._took_s is None:
            self._took_s = took_s
            self._rule.began_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look again."""
        return now_s - self._looked_s >= _EVERY_S

    def look(self, reports: Mapping[str, StageReport], now_s: float) -> Move | None:
        """Returns the move to make now, if there is one; ``reports`` are of all workers by key, this one included."""
        self._looked_s = now_s
        self._has_stepped = any(report.version for report in reports.values())
        return self._rule.look(placed_workers(reports), now_s)

    def put_off(self, now_s: float) -> None:
        """Looks again in a minute: the worker may not move now."""
        self._looked_s = now_s + _PUT_OFF_S

    def _move_s(self, name: str) -> float:
        """Leaving, and the longer of what the state takes over the link and what joining has taken here."""
        fetch_s = self._sizes[name] / self._config.swarm.rebalance.link_bytes_per_s
        joined_s = (self._took_s or 0.0) * self._sizes[name] / self._sizes[self._stage]
        return self._config.swarm.join.leave_s / 2 + max(fetch_s, joined_s)

    def _may_begin(self, name: str) -> bool:
        if not self._has_stepped:
            return True
        directory = self._config.swarm.checkpoint.directory
        return any(found.stage == name for found in named_files(directory, self._config.run_id))


def _stage_bytes(shape: SwarmShape, name: str) -> int:
    plan = shape.plan
    layers = len(plan.ranges[plan.index(name)]) * layer_parameters(shape.model)
    table = shape.model.vocab_size * shape.model.dim if name in (plan.names[0], plan.names[-1]) else 0
    return _BYTES_PER_PARAMETER * max(1, layers + table)
