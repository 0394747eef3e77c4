"""From a configuration to a node that trains: everything that can go wrong is tried before anything is changed."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from trainer.checkpoint.node import Checkpointer, take_over_former_names, wallet_id
from trainer.errors import PeerUnavailableError, TrainerError
from trainer.inner import choose_device
from trainer.model import ModelConfig, available_memory_bytes, num_parameters
from trainer.monitor import MeteredIterator
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.run.config import RunConfig
from trainer.run.node.cluster import Ranks, cluster_collective, joined_cluster
from trainer.run.node.data import StoreWatch, endless, open_dataset, open_session
from trainer.run.node.replica import Replica
from trainer.run.node.resolving import checkpoint_to_resume, resolve, write_config
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import Node, TrainingDisplay
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
_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for main memory says; it has no exception class of its own."""
_BACKENDS = ("gloo", "NCCL")


def run_node(config: RunConfig, display: TrainingDisplay, stop: StopRequest) -> None:
    """Trains as one node until asked to stop.

    Raises:
        TrainerError: it cannot begin, or not go on; what was saved is whole.
        LoaderError: the store cannot be read.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with _torch_errors_mapped(), ExitStack() as stack:
        ranks = stack.enter_context(joined_cluster(config))
        _seed_generators(ranks.own(config))
        node = _build(config, ranks, display, stop, stack)
        with stop.on_signals():
            node.begin()
            node.run()


@contextmanager
def _torch_errors_mapped() -> Iterator[None]:
    """Maps errors of torch that a user can mend to one line.

    Raises:
        TrainerError: no memory was left.
        PeerUnavailableError: a rank of the process group is gone.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY in str(error):
            raise TrainerError(
                f"expected enough memory for model and activations, found none left ({text}); take a smaller "
                "--batch-size, --seq-len or --preset, or inner.activation_checkpointing=true"
            ) from error
        if isinstance(error, dist.DistError) or any(backend in str(error) for backend in _BACKENDS):
            raise PeerUnavailableError(
                f"a rank of the process group is gone or silent; start the job again from its checkpoints: {text}"
            ) from error
        raise


def _seed_generators(config: RunConfig) -> None:
    """Seeds the process's own generators; weights and data order have seeds of their own."""
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}:{config.node_id}".encode()).digest()[:4])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _build(config: RunConfig, ranks: Ranks, display: TrainingDisplay, stop: StopRequest, stack: ExitStack) -> Node:
    device = choose_device(config.device)
    store = StoreWatch(open_session(config.data), config.data.refresh_s)
    wallet = wallet_id(config.checkpoint.token, config.node_id)
    if config.checkpoint.token:
        take_over_former_names(config.checkpoint.directory, config.checkpoint.token, ranks.instance)
    checkpointer = stack.enter_context(
        Checkpointer(config.checkpoint.directory, wallet, config.checkpoint.keep, instance=ranks.instance)
    )
    saved = checkpoint_to_resume(config, wallet, ranks)
    on_cpu = device.type == "cpu"

    def memory_bytes() -> int:
        found = config.model.memory_bytes or available_memory_bytes(device.type)
        return ranks.least(found // ranks.local_size if on_cpu else found)

    resolved, shape = resolve(config, saved, ranks.least(store.rows()), memory_bytes, shared_memory=on_cpu)
    write_config(resolved, checkpointer.path.with_suffix(".yaml"))
    resolved = ranks.own(resolved)
    dataset = open_dataset(resolved)
    stack.callback(dataset.close)
    batches = MeteredIterator(endless(dataset))
    collective, network = _collective(resolved, shape, store, ranks, stop, stack)
    num_ids = ranks.least(store.num_ids)
    replica = Replica(resolved, shape, collective, device, batches, num_ids, dataset.report_loss)
    watch = Watch(resolved, network, stop.ask)
    current_loss = float("nan")
    if saved is not None:
        replica.load(saved)
        dataset.load_state_dict(saved.loader["stream"])
        watch.tracker.load_state_dict(saved.loader["tracker"])
        current_loss = saved.current_loss
        logger.info("going on from step %d of %s", replica.inner.step_index, checkpointer.path)
    logger.info(
        "%s: %s parameters, %d rows of %d tokens a step, on %s",
        resolved.node_id,
        f"{num_parameters(shape):,}",
        resolved.inner.micro_batch_size * resolved.inner.accumulation_steps,
        resolved.inner.seq_len,
        device,
    )
    stack.enter_context(watch)
    if network is not None:
        stack.callback(network.stop)
    return Node(
        config=resolved,
        ranks=ranks,
        replica=replica,
        dataset=dataset,
        batches=batches,
        store=store,
        checkpointer=checkpointer,
        watch=watch,
        network=network,
        display=display,
        stop=stop,
        current_loss=current_loss,
    )


def _collective(
    config: RunConfig, shape: ModelConfig, store: StoreWatch, ranks: Ranks, stop: StopRequest, stack: ExitStack
) -> tuple[Collective, Network[SharedState] | None]:
    """Returns the partners of outer steps, and the network side, where there is one."""
    if ranks.in_cluster:
        collective = cluster_collective(config)
        stack.callback(collective.close)
        return collective, None
    if not config.discovery.initial_peers and not config.rpc.port:
        return LocalCollective(config.node_id), None

    # These bring grpc, which a node alone does not need.
    from trainer.run.node.compatibility import terms_of
    from trainer.run.node.identity import identity_of
    from trainer.run.node.network import Network
    from trainer.run.node.state_form import StateFit

    max_bytes = int(_GROWTH * _STATE_BYTES_PER_PARAMETER * num_parameters(shape))
    fit = StateFit(shape, config.diloco.num_fragments, max_bytes)
    terms = terms_of(config, shape, store.vocabulary)
    network = Network(config, identity_of(config), terms, store.rows, fit, stopping=stop)
    return network.collective, network
