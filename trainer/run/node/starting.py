"""From a configuration to a node that trains: in the order in which things can go wrong, before anything is changed."""

from __future__ import annotations

import hashlib
import logging
import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.checkpoint.node import CheckpointContents, Checkpointer, take_over_former_names, wallet_id
from trainer.inner import choose_device
from trainer.model import ModelConfig, available_memory_bytes, num_parameters
from trainer.monitor import MeteredIterator
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.run.config import RunConfig
from trainer.run.node.announcement import terms_of
from trainer.run.node.cluster import Ranks, cluster_collective, joined_cluster
from trainer.run.node.compatibility import StateFit
from trainer.run.node.data import endless, open_dataset, open_session
from trainer.run.node.replica import Replica
from trainer.run.node.resolving import resolve, write_config
from trainer.run.node.resuming import checkpoint_to_resume
from trainer.run.node.stopping import StopRequest
from trainer.run.node.store_watch import StoreWatch
from trainer.run.node.torch_errors import torch_error_message
from trainer.run.node.training import Node, ProgressLine
from trainer.run.node.watching import Watch

if TYPE_CHECKING:
    from trainer.outer.diloco import SharedState
    from trainer.run.node.network import Network

__all__ = ["run_node"]

logger = logging.getLogger(__name__)

_STATE_BYTES_PER_PARAMETER = 12
"""Anchor, momentum and reference, as they travel to a joiner."""
_GROWTH = 1.5
"""A run's vocabulary may be larger than this node's first guess."""


def run_node(config: RunConfig, line: ProgressLine, stop: StopRequest) -> None:
    """Trains as one node until asked to stop.

    Raises:
        TrainerError: it cannot begin, or not go on; what was saved is whole.
        LoaderError: the store cannot be read.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with torch_error_message(), ExitStack() as stack:
        ranks = stack.enter_context(joined_cluster(config))
        _seed_generators(ranks.own(config))
        node = _build(config, ranks, line, stop, stack)
        with stop.on_signals():
            node.begin()
            node.run()


def _seed_generators(config: RunConfig) -> None:
    """The process's own generators, for whatever draws from them: weights and data order have seeds of their own."""
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}:{config.node_id}".encode()).digest()[:4])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(slots=True, kw_only=True)
class _Site:
    """What is known before a model is made."""

    config: RunConfig
    """Resolved, and this rank's own."""
    ranks: Ranks
    device: torch.device
    store: StoreWatch
    checkpointer: Checkpointer
    saved: CheckpointContents | None
    shape: ModelConfig


def _build(config: RunConfig, ranks: Ranks, line: ProgressLine, stop: StopRequest, stack: ExitStack) -> Node:
    site = _survey(config, ranks, stack)
    config, shape = site.config, site.shape
    dataset = open_dataset(config)
    stack.callback(dataset.close)
    batches = MeteredIterator(endless(dataset))
    collective, network = _collective(site, stop, stack)
    num_ids = site.ranks.least(site.store.num_ids)
    replica = Replica(config, shape, collective, site.device, batches, num_ids, dataset.report_loss)
    watch = Watch(config, network, stop.ask)
    current_loss = float("nan")
    if site.saved is not None:
        replica.load(site.saved)
        dataset.load_state_dict(site.saved.loader["stream"])
        watch.tracker.load_state_dict(site.saved.loader["tracker"])
        current_loss = site.saved.current_loss
        logger.info("going on from step %d of %s", replica.inner.step_index, site.checkpointer.path)
    _say_what_is_trained(site)
    stack.enter_context(watch)
    if network is not None:
        stack.callback(network.stop)
    return Node(
        config=config,
        ranks=ranks,
        replica=replica,
        dataset=dataset,
        batches=batches,
        store=site.store,
        checkpointer=site.checkpointer,
        watch=watch,
        network=network,
        line=line,
        stop=stop,
        current_loss=current_loss,
    )


def _survey(config: RunConfig, ranks: Ranks, stack: ExitStack) -> _Site:
    """Looks at device, store, checkpoints and memory, and decides what is left to decide."""
    device = choose_device(config.device)
    store = StoreWatch.open(open_session(config.data), config.data.refresh_s)
    wallet = wallet_id(config.checkpoint.token, config.node_id)
    if config.checkpoint.token:
        take_over_former_names(config.checkpoint.directory, config.checkpoint.token, ranks.instance)
    checkpointer = stack.enter_context(
        Checkpointer(config.checkpoint.directory, wallet, config.checkpoint.keep, instance=ranks.instance)
    )
    saved = checkpoint_to_resume(config, wallet, ranks)

    def memory_bytes() -> int:
        on_cpu = device.type == "cpu"
        found = config.model.memory_bytes or available_memory_bytes(device.type)
        return ranks.least(found // ranks.local_size if on_cpu else found)

    rows = ranks.least(store.rows())
    config, shape = resolve(config, saved, rows, memory_bytes, shared_memory=device.type == "cpu")
    write_config(config, checkpointer.path.with_suffix(".yaml"))
    return _Site(
        config=ranks.own(config),
        ranks=ranks,
        device=device,
        store=store,
        checkpointer=checkpointer,
        saved=saved,
        shape=shape,
    )


def _collective(site: _Site, stop: StopRequest, stack: ExitStack) -> tuple[Collective, Network[SharedState] | None]:
    """Whom outer steps are made with, and the side that talks to them, where there is one."""
    config = site.config
    if site.ranks.in_cluster:
        collective = cluster_collective(config)
        stack.callback(collective.close)
        return collective, None
    if not config.discovery.initial_peers and not config.rpc.port:
        return LocalCollective(config.node_id), None

    from trainer.run.node.identity import identity_of
    from trainer.run.node.network import Network  # brings grpc, which a node alone does not need

    network = Network(
        config,
        identity_of(config),
        terms_of(config, site.shape, site.store.vocabulary),
        site.store.rows,
        StateFit(
            site.shape,
            config.diloco.num_fragments,
            max_bytes=int(_GROWTH * _STATE_BYTES_PER_PARAMETER * num_parameters(site.shape)),
        ),
        stopping=stop,
    )
    return network.collective, network


def _say_what_is_trained(site: _Site) -> None:
    inner = site.config.inner
    logger.info(
        "%s: %s parameters, %d rows of %d tokens a step, on %s",
        site.config.node_id,
        f"{num_parameters(site.shape):,}",
        inner.micro_batch_size * inner.accumulation_steps,
        inner.seq_len,
        site.device,
    )
