"""What a worker is put together from: its network, its rounds, and the service that computes for drivers.

    options, shape and built stage → `stage_network` → `stage_synchroniser` → `stage_worker`

What the parts are told of the strategy is decided here: whose averages are judged, in how many rounds all weights are
shared, how far a stage may be ahead of a worker that still follows it. Nothing here starts anything: no thread, no
connection and no file but the key, so a worker that does not fit its run has cost the others nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from trainer.compression.activations import LinkMeter
from trainer.pipeline.worker import StageWorker
from trainer.pipeline.worker.stepping import Stepped, Synchronised
from trainer.run.config import RunConfig
from trainer.run.node.identity import identity_of
from trainer.run.node.network import Network
from trainer.run.node.peer_book import as_said
from trainer.run.node.stopping import StopRequest
from trainer.run.signed import SignedRun
from trainer.run.swarm.building import BuiltStage
from trainer.run.swarm.lifecycle import StartupVersionCheck
from trainer.run.swarm.peer_view import SwarmPeers, holds_stage, seen_as_part
from trainer.run.swarm.shape import SwarmShape, target_tokens_of
from trainer.run.swarm.synchroniser import JudgedCollective, ReplicaSynchroniser, StagePeers, state_choice, state_form

_MAX_ROUNDS_AHEAD: Final = 3
"""With averaged gradients: steps of most others, after which a worker that has made none of them takes their state."""
_GRACE_LOOKS: Final = 5
"""Multiple of `JoinConfig.first_peers_s` after which a stage's state that nobody has counts as lost."""


def stage_network(
    config: RunConfig, shape: SwarmShape, built: BuiltStage, stop: StopRequest, run: SignedRun | None
) -> Network[Any]:
    """Returns the worker's side to all other processes of the run, not started yet; makes a missing key."""
    rows = shape.model.vocab_size
    return Network(
        config,
        identity_of(config),
        shape.terms(built.name),
        lambda: rows,
        state_form(config, built.module, rows),
        stopping=stop,
        choose=state_choice(config),
        same_kind=partial(holds_stage, built.name),
        stages=shape.plan.names,
        near=shape.plan.around(built.name),
        run=run,
        stage=built.name,
        scope=built.name if config.swarm.whole_nodes else "",
        seen_as=seen_as_part(built.name, shape) if config.swarm.whole_nodes else as_said,
    )


def stage_synchroniser(
    config: RunConfig, shape: SwarmShape, built: BuiltStage, network: Network[Any], others: StagePeers
) -> ReplicaSynchroniser:
    """Returns the rounds of the stage's replica, by way of the network; of two members, each judges the other's part.

    Under averaged gradients that part is a gradient, and the rounds of slices beside them are not judged.
    """
    averages_gradients = config.strategy == "grad"
    judged = JudgedCollective(
        network.collective,
        network.peer_id,
        network.distrust,
        num_slices=0 if config.has_common_state else config.swarm.sparta.num_slices,
        is_sparse=config.strategy == "sparseloco",
    )
    return ReplicaSynchroniser(
        config,
        built,
        network.collective if averages_gradients else judged,
        others,
        lambda: network.collective.behind,
        shape.model.vocab_size,
        averager=judged if averages_gradients else None,
    )


def stage_startup_check(
    config: RunConfig, shape: SwarmShape, built: BuiltStage, peers: SwarmPeers
) -> StartupVersionCheck:
    """Returns what decides whether the stage may begin with first weights, among these peers."""
    return StartupVersionCheck(
        built.name,
        shape.plan.names,
        config.swarm.checkpoint,
        _GRACE_LOOKS * config.swarm.join.first_peers_s,
        version=lambda: built.replica.version,
        reports=peers.reports,
    )


def stage_worker(
    config: RunConfig,
    shape: SwarmShape,
    built: BuiltStage,
    network: Network[Any],
    others: StagePeers,
    peers: SwarmPeers,
    synchroniser: ReplicaSynchroniser,
    meter: LinkMeter,
    *,
    on_step: Stepped,
    on_round: Synchronised,
) -> StageWorker:
    """Returns the service around the stage, at the network's endpoint; `StageWorker` says what it is told and when."""
    worker = StageWorker(
        network.endpoint,
        shape.plan,
        built.name,
        built.replica,
        built.codec,
        config.swarm.worker,
        target_tokens=target_tokens_of(config),
        peers=others.peers,
        strategy=synchroniser,
        gradients=synchroniser.gradients,
        meter=meter,
        batches=config.swarm.stage.backward == "recompute",
        num_fragments=_num_fragments(config),
        max_lead=_max_lead(config),
        on_step=on_step,
        on_round=on_round,
        drivers=peers.drivers,
        keepers=peers.keepers,
    )
    worker.service.workers = lambda stage: {said.peer_id: said.peer() for said in peers.workers_heard(stage)}
    return worker


def _num_fragments(config: RunConfig) -> int:
    """In how many rounds all of a replica's weights are shared."""
    if config.moves_anchor:
        return config.outer.num_fragments
    return 1 if config.strategy == "grad" else config.swarm.sparta.num_slices


def _max_lead(config: RunConfig) -> int:
    """Steps that the stage may be ahead of a worker that follows it.

    Gradients of forward passes that are older than `max_staleness` are refused anyway.
    """
    if config.strategy == "grad":
        return _MAX_ROUNDS_AHEAD
    staleness = config.swarm.stage.max_staleness
    return max(staleness, config.outer.inner_steps) if config.moves_anchor else staleness
