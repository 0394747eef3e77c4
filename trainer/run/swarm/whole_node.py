"""A node that holds a whole model in a run whose other replicas are swarms of stages (`swarm.whole_nodes`).

It trains as any node of whole models does (`trainer.run.node.starting`), on data of its own, and takes part in the
rounds of every stage with the stage's part of its model (`trainer.outer.diloco.parts`). Three things follow from the
pipelines beside it: the model is the very one that they cut, with the subspace in which their links are compressed, so
its weights are kept there as theirs are; the vocabulary does not grow; and the options of the run's file that decide a
stage's step are the same for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.inner import Batch, InnerLoop, make_optimizer
from trainer.model import ModelConfig, Transformer, split
from trainer.model.subspace import SubspaceConstraint
from trainer.outer.diloco import DiLoCoTrainer, SharedState
from trainer.outer.diloco.parts import PartsTrainer
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.outer.engine.ddp import EveryStepStrategy
from trainer.outer.engine.strategy import OuterResult, OuterStrategy
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_of
from trainer.run.node.network import Network
from trainer.run.node.replica import Replica, with_kept_tensors
from trainer.run.node.starting import run_node
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import TrainingDisplay
from trainer.run.signed import SignedRun
from trainer.run.swarm.shape import SwarmShape, only_process, shape_of
from trainer.run.swarm.synchroniser import JudgedCollective
from trainer.run.swarm.whole_network import WholeNetwork


def run_whole_node(config: RunConfig, stop: StopRequest, display: TrainingDisplay) -> None:
    """Trains as one whole node among swarms of stages until asked to stop; see `trainer.run.node.starting.run_node`."""
    with only_process(config):
        run_node(config, display, stop, kind=WholeNode(shape_of(config)))


def stages_of(model: Transformer, shape: SwarmShape) -> dict[str, nn.Module]:
    """Returns the stages of a whole model, which share its parameters, by name."""
    return dict(zip(shape.plan.names, split(model, shape.plan.ranges), strict=True))


@dataclass(frozen=True, slots=True)
class WholeNode:
    """What is otherwise at a whole node among swarms (a `trainer.run.node.starting.NodeKind`)."""

    swarm: SwarmShape

    @property
    def shape(self) -> ModelConfig:
        """Of the model that the swarms cut."""
        return self.swarm.model

    def network(self, config: RunConfig, run: SignedRun | None, stopping: Callable[[], bool]) -> WholeNetwork | None:
        """See `NodeKind.network`."""
        if not (config.discovery.initial_peers or config.rpc.port or config.relay.through):
            return None
        with torch.device("meta"):
            stages = stages_of(Transformer(self.shape), self.swarm)
        return WholeNetwork(config, identity_of(config), self.swarm, stages, stopping, run)

    def replica(
        self,
        config: RunConfig,
        network: Network[Any] | None,
        run: SignedRun | None,
        device: torch.device,
        batches: Iterator[Batch],
        on_loss: Callable[[float], object],
    ) -> PartsReplica:
        """See `NodeKind.replica`."""
        replica = PartsReplica(config, self.swarm, network, device, batches, on_loss)
        if run is not None:
            for trainer in replica.parts.trainers.values():
                trainer.changes = run.outer_changes(lambda _number: None)  # The node goes by the furthest part's.
        if isinstance(network, WholeNetwork):
            network.places = replica.parts.trainers
        return replica


class PartsReplica(Replica):
    """A whole model in training whose stages have rounds of their own; ``network``: with whom, None: alone."""

    def __init__(
        self,
        config: RunConfig,
        shape: SwarmShape,
        network: Network[Any] | None,
        device: torch.device,
        batches: Iterator[Batch],
        on_loss: Callable[[float], object],
    ) -> None:
        self._shape = shape
        self._network = network
        alone = LocalCollective(config.node_id)
        super().__init__(config, shape.model, alone, device, batches, shape.num_ids, on_loss)

    def _assemble(self) -> None:
        config = self.config
        self.optimizer = make_optimizer(self.model, config.inner)
        if self.model.config.subspace_rank:
            constraint = SubspaceConstraint(self.model, self.model.config)
            constraint.ensure()
            constraint.attach(self.optimizer)
        self.inner = InnerLoop(
            self.model, self.optimizer, config.inner, self._batches, self.device, on_loss=self._on_loss
        )
        self.diloco = self.gradients = None
        self.strategy: OuterStrategy = EveryStepStrategy()
        self.parts = PartsTrainer(
            {
                name: DiLoCoTrainer(
                    stage,
                    config.outer,
                    self._collective_of(name),
                    vocab_rows=self.vocab_rows,
                    powersgd_rank=config.powersgd_rank,
                    residual_decay=config.residual_decay,
                )
                for name, stage in stages_of(self.model, self._shape).items()
            }
        )

    def _collective_of(self, stage: str) -> Collective:
        """With whom a stage's rounds are; of two members each refuses what contradicts its own, as workers do."""
        if self._network is None:
            return self._collective
        group = self._network.group(stage)
        is_sparse = self.config.strategy == "sparseloco"
        return JudgedCollective(group.collective, self._network.peer_id, group.distrust, is_sparse=is_sparse)

    @property
    def sharing(self) -> PartsTrainer:
        """What holds the states that this node has in common with others."""
        return self.parts

    def configure(self, config: RunConfig) -> None:
        """See `Replica.configure`."""
        super().configure(config)
        self.parts.configure(config.outer)

    def after_inner_step(self, num_batches: int) -> tuple[OuterResult, ...]:
        """See `Replica.after_inner_step`."""
        return self.parts.after_inner_step(num_batches)

    def drain(self) -> tuple[OuterResult, ...]:
        """See `Replica.drain`."""
        return self.parts.drain()

    def outer_step_of(self, part: str) -> int | None:
        """See `Replica.outer_step_of`."""
        return self.parts.trainers[part].outer_step

    def adopt(  # type: ignore[override]  # The states are those of this node's own network.
        self, shared: Mapping[str, SharedState], *, keep_work: bool = False
    ) -> None:
        """Takes up the others' states of some stages; the schedule goes on from the stage that is least far.

        AdamW's moments stay: they nearly fit. Work is never kept: no round of a stage closes by a quorum.
        """
        del keep_work
        self.parts.adopt(shared)
        if self.parts.num_inner_steps > self.inner.step_index:
            self.inner.set_step(self.parts.num_inner_steps)

    def grow(self, rows: int, num_ids: int) -> None:
        """Does nothing: the vocabulary of a swarm does not grow."""
        del rows, num_ids

    def _strategy_state(self) -> dict[str, Any]:
        return with_kept_tensors(self.parts.state_to_write())

    def _load_strategy(self, saved: Mapping[str, Any]) -> None:
        if self.model.config.subspace_rank and saved:
            SubspaceConstraint(self.model, self.model.config).ensure()
        self.parts.load_state_dict(saved)
