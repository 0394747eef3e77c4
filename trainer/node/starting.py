"""From a configuration to a node that trains: in the order in which things can go wrong, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from trainer.checkpoint import CheckpointContents, Checkpointer, checkpoint_path, load_newest, wallet_id
from trainer.config import RunConfig, to_yaml
from trainer.engine.collective import Collective
from trainer.engine.local import LocalCollective
from trainer.errors import CheckpointMismatchError
from trainer.inner import choose_device
from trainer.inner.loop import Batch
from trainer.model import ModelConfig, num_parameters
from trainer.node.cluster import ClusterRank, cluster_collective, joined_cluster
from trainer.node.data import open_dataset
from trainer.node.network import Network
from trainer.node.replica import Replica
from trainer.node.resolving import fits, resolve, write_config
from trainer.node.stopping import StopRequest
from trainer.node.terms import terms_of
from trainer.node.training import Node, ProgressLine
from trainer.node.vocabulary import VocabularyWatch, within_vocabulary
from trainer.node.watching import Watch
from trainer.observe import MeteredIterator

__all__ = ["run_node"]

logger = logging.getLogger(__name__)

_STATE_BYTES_PER_PARAMETER = 12
"""Anchor, momentum and reference, as they travel to a joiner."""
_GROWTH = 1.5
"""A run's vocabulary may be larger than this node's first guess."""


@dataclass(slots=True)
class _Late:
    """What is asked for before it is there: the network tells the watch, the watch asks the network."""

    watch: Watch | None = None
    network: Network | None = None


def run_node(config: RunConfig, line: ProgressLine, stop: StopRequest) -> None:
    """Trains as one node until asked to stop.

    Raises:
        TrainerError: it cannot begin, or not go on; what was saved is whole.
        LoaderError: the store cannot be read.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with ExitStack() as stack:
        rank = stack.enter_context(joined_cluster(config))
        if rank is not None:
            config = rank.own(config)
        node = _build(config, rank, line, stop, stack)
        node.begin()
        with stop.on_signals():
            node.run()


def _build(
    config: RunConfig, rank: ClusterRank | None, line: ProgressLine, stop: StopRequest, stack: ExitStack
) -> Node:
    device = choose_device(config.device)
    vocabulary = VocabularyWatch(config.data)
    wallet = wallet_id(config.checkpoint.token, config.node_id)
    instance = rank.instance if rank is not None else ""
    checkpointer = stack.enter_context(
        Checkpointer(config.checkpoint.directory, wallet, config.checkpoint.keep, instance=instance)
    )
    saved = _saved(config, wallet, instance)
    config, shape = resolve(config, saved, vocabulary.rows(), device.type)
    path = write_config(config, wallet, instance)
    logger.info("%s\n%s", path, to_yaml(replace(config, checkpoint=replace(config.checkpoint, token=""))))
    dataset = open_dataset(config, config.inner.micro_batch_size)
    late = _Late()
    collective, network = _collective(config, shape, vocabulary, rank, late, stop, stack)
    replica: Replica | None = None

    def rows() -> int:
        return replica.vocab_rows if replica is not None else shape.vocab_size

    batches = MeteredIterator(within_vocabulary(cast("Iterator[Batch]", _forever(dataset)), rows))
    replica = Replica(config, shape, collective, device, batches, dataset.report_loss)
    watch = _watch(config, network, late, stop)
    if saved is not None:
        replica.load(saved)
        dataset.load_state_dict(saved.loader["stream"])
        watch.tracker.load_state_dict(saved.loader["tracker"])
        logger.info(
            "going on from step %d of %s",
            replica.inner.step_index,
            checkpoint_path(config.checkpoint.directory, wallet, instance),
        )
    logger.info(
        "%s: %s parameters, %d rows of %d tokens a step, on %s",
        config.node_id,
        f"{num_parameters(shape):,}",
        config.inner.micro_batch_size * config.inner.accumulation_steps,
        config.inner.seq_len,
        device,
    )
    stack.enter_context(watch)
    if network is not None:
        network.start()
        stack.callback(network.stop)
        logger.info("node %s listens at %s", network.peer_id[:8], network.address)
    return Node(
        config=config,
        replica=replica,
        dataset=dataset,
        batches=cast("MeteredIterator[object]", batches),
        vocabulary=vocabulary,
        checkpointer=checkpointer,
        watch=watch,
        network=network,
        line=line,
        stop=stop,
        current_loss=saved.current_loss if saved is not None else float("nan"),
    )


def _collective(
    config: RunConfig,
    shape: ModelConfig,
    vocabulary: VocabularyWatch,
    rank: ClusterRank | None,
    late: _Late,
    stop: StopRequest,
    stack: ExitStack,
) -> tuple[Collective, Network | None]:
    if rank is not None:
        collective = cluster_collective(config)
        stack.callback(collective.close)
        return collective, None
    if not config.discovery.initial_peers and not config.rpc.port:
        return LocalCollective(config.node_id), None
    network = Network(
        config,
        terms_of(config, shape, vocabulary.vocabulary),
        vocabulary.rows,
        on_peers=lambda found: late.watch.tracker.peers(found) if late.watch is not None else None,
        on_state=lambda step, digest: _tell_state(late, step, digest),
        max_state_bytes=int(_GROWTH * _STATE_BYTES_PER_PARAMETER * num_parameters(shape)),
        stopping=stop,
    )
    return network.collective, network


def _tell_state(late: _Late, outer_step: int, digest: str) -> None:
    if late.watch is not None:
        late.watch.tracker.set_state(outer_step, digest)
        late.watch.observer.event("state", outer_step=outer_step, digest=digest)


def _watch(config: RunConfig, network: Network | None, late: _Late, stop: StopRequest) -> Watch:
    refused: Callable[[], dict[str, int]] = network.refused if network is not None else dict
    traffic: Callable[[], tuple[int, int]] = network.traffic if network is not None else lambda: (0, 0)
    late.watch = Watch(config, network.peer_id if network is not None else "", stop.ask, refused, traffic)
    return late.watch


def _saved(config: RunConfig, wallet: str, instance: str) -> CheckpointContents | None:
    """The checkpoint to go on from; one of another preset than was named is put aside."""
    found: dict[str, Any] | None = load_newest(config.checkpoint.directory, wallet, instance)
    if found is None:
        return None
    saved = CheckpointContents.from_mapping(found)
    if fits(config, saved):
        _check_run(config, saved)
        return saved
    newest = checkpoint_path(config.checkpoint.directory, wallet, instance)
    for path in newest.parent.glob(f"{newest.stem}*.pt"):
        path.rename(path.with_name(f"replaced-{int(saved.timestamp)}-{path.name}"))
    logger.warning(
        "the checkpoint is not of the preset %s: it was put aside as replaced-%d-%s, and training begins anew",
        config.model.preset,
        int(saved.timestamp),
        newest.name,
    )
    return None


def _check_run(config: RunConfig, saved: CheckpointContents) -> None:
    run_id = saved.config.get("run_id")
    if run_id != config.run_id:
        raise CheckpointMismatchError(
            f"expected a checkpoint of run {config.run_id!r}, found one of {run_id!r}; name another checkpoint folder "
            "(--checkpoint-dir) or that run (--run-id)"
        )


def _forever(dataset: Any) -> Iterator[Any]:
    while True:
        yield from dataset
