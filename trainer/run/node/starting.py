"""From a configuration to a node that trains: everything that can go wrong is tried before anything is changed.

What the node resumes and trains is decided in `resolving`. Under torchrun, what ranks read of their machines is agreed
first, as the least of what they found, over a process group of its own (gloo).
"""

from __future__ import annotations

import hashlib
import logging
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from genesis.store.durable import TemporaryFile
from trainer.checkpoint.node import (
    CheckpointContents,
    Checkpointer,
    take_over_former_names,
    wallet_id,
)
from trainer.errors import (
    CheckpointError,
    CheckpointMismatchError,
    PeerUnavailableError,
    TrainerError,
    TrainerUsageError,
)
from trainer.evaluation import Evaluator, HeldOut
from trainer.inner import Batch, autocast_for, use_device
from trainer.inner.memory import shortage
from trainer.inner.peak import peak_of
from trainer.inner.rank_place import RankPlace, choose_parallel
from trainer.model import ModelConfig, available_memory_bytes, flops_per_token, num_parameters
from trainer.model.sizing import SHARED_BYTES_PER_PARAMETER, TRAINING_BYTES_PER_PARAMETER
from trainer.monitor import Curve, CurveLog, MeteredIterator, SpeedMeter, require_loggers
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.run.config import RunConfig, changed_options, to_mapping, to_yaml
from trainer.run.node.cluster import Ranks, cluster_collective, joined_cluster, num_processes
from trainer.run.node.data import StoreWatch, endless, open_dataset, open_session
from trainer.run.node.origin import Origin, origin_of
from trainer.run.node.replica import Replica
from trainer.run.node.resolving import checkpoint_to_resume, resolve, wanted_parallel
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import Node, TrainingDisplay
from trainer.run.node.watch import Watch

if TYPE_CHECKING:
    from loader.session import Session
    from trainer.run.node.bucket_network import BucketNetwork
    from trainer.run.node.network import Network
    from trainer.run.node.node_ranks import NodeRanks
    from trainer.run.node.state_form import StateForm
    from trainer.run.signed import SignedRun

logger = logging.getLogger(__name__)

_STATE_BYTES_PER_PARAMETER = 12  # Anchor, momentum and reference, as they travel to a joiner.
_GROWTH = 1.5  # A run's vocabulary may be larger than this node's first guess.
_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for main memory says; it has no exception class of its own."""
_BACKENDS = ("gloo", "NCCL")


class NodeKind(Protocol):
    """What is otherwise at a node that is not simply a replica of the run's model among its likes."""

    @property
    def shape(self) -> ModelConfig:
        """Of the model."""

    def network(self, config: RunConfig, run: SignedRun | None, stopping: Callable[[], bool]) -> Network[Any] | None:
        """Returns its side to the others; None: it meets none."""

    def replica(
        self,
        config: RunConfig,
        network: Network[Any] | None,
        run: SignedRun | None,
        device: torch.device,
        batches: Iterator[Batch],
        on_loss: Callable[[float], object],
    ) -> Replica:
        """Returns its model in training."""


def run_node(
    config: RunConfig,
    display: TrainingDisplay,
    stop: StopRequest,
    train: Callable[[Node], None] = Node.run,
    kind: NodeKind | None = None,
) -> None:
    """Trains as one node until asked to stop; raises `TrainerError` and `LoaderError`, and what was saved is whole.

    ``train`` does something else with the node once it has begun, such as measuring it. ``kind`` says what is otherwise
    than at a node that holds what all others of the run hold.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with _torch_errors_mapped(), ExitStack() as stack:
        node_ranks = _joined_node(config, stack)
        ranks = stack.enter_context(joined_cluster(config))
        # The process's own generators; weights and data order have seeds of their own.
        seed_text = f"{config.seed}:{ranks.own(config).node_id}"
        seed = int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:4])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        if node_ranks is not None and node_ranks.place.rank:
            from trainer.run.node.ranked import follow

            with stop.on_signals():  # What they ask for, rank 0 does, at all ranks together.
                follow(node_ranks, use_device(config.device))
            return
        node = _build(config, ranks, display, stop, stack, node_ranks, kind)
        with stop.on_signals():
            node.begin()
            train(node)
        if node_ranks is not None:
            node_ranks.stop()


def _joined_node(config: RunConfig, stack: ExitStack) -> NodeRanks | None:
    """Joins the other processes of this node; None for a node of one, or where each of torchrun's is a node."""
    if num_processes() == 1 or config.engine == "torch":
        return None
    # Brings the distributed parts of torch, a second of start-up that a node of one process does not need.
    from trainer.run.node.node_ranks import joined_node

    return stack.enter_context(joined_node(config))


@contextmanager
def _torch_errors_mapped() -> Iterator[None]:
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


def _build(
    config: RunConfig,
    ranks: Ranks,
    display: TrainingDisplay,
    stop: StopRequest,
    stack: ExitStack,
    node_ranks: NodeRanks | None = None,
    kind: NodeKind | None = None,
) -> Node:
    place = RankPlace() if node_ranks is None else node_ranks.place
    if node_ranks is not None and config.strategy == "grad":
        raise TrainerUsageError(
            f"strategy grad: expected a node of one process, found {place.size} ranks; start each as a node "
            "of its own, or use strategy diloco"
        )
    if node_ranks is not None and kind is not None:
        raise TrainerUsageError(
            f"swarm.whole_nodes: expected a node of one process, found {place.size} ranks; start each as a node of its "
            "own, on a GPU of its own"
        )
    device = use_device(config.device)
    require_loggers(config.log.to)
    logger.info("reading the manifest and the vocabulary of %s", config.data.store)
    session = open_session(config.data)
    store = StoreWatch(session, config.data.refresh_s)
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
        return ranks.least(found // (ranks.local_size * place.local_size) if on_cpu else found)

    origin = origin_of(config, saved, store.vocabulary)
    _check_ranks(ranks, origin)
    vocab_rows = ranks.least(store.rows())
    config = replace(config, model=origin.choice)
    first = origin.shape(vocab_rows) if kind is None else kind.shape
    resolved, shape = resolve(config, saved, vocab_rows, memory_bytes, shared_memory=on_cpu, place=place, first=first)
    if not ranks.in_cluster and node_ranks is None:
        _warn_of_shortage(resolved, shape, memory_bytes, shared_memory=on_cpu)
    _write_config(resolved, checkpointer.path.with_suffix(".yaml"))
    resolved = ranks.own(resolved)
    dataset = open_dataset(resolved)
    stack.callback(dataset.close)
    batches = MeteredIterator(endless(dataset))
    run = _signed_run(resolved, ranks)
    collective: Collective = LocalCollective(resolved.node_id)
    network: Network[Any] | BucketNetwork | None
    if kind is None:
        collective, network = _collective(resolved, shape, store, ranks, stop, stack, run)
    else:
        network = kind.network(resolved, run, stop)
    num_ids = ranks.least(store.num_ids)
    end_id = store.vocabulary.eos_id
    fill_ = origin.fill_ if origin.pretrained is not None else None
    logger.info("building the model and its optimizer on %s", device)
    peers, bucket = _kinds_of(network)
    replica: Replica
    if kind is not None:
        replica = kind.replica(resolved, peers, run, device, batches, dataset.report_loss)
    elif node_ranks is None:
        replica = Replica(
            resolved,
            shape,
            collective,
            device,
            batches,
            num_ids,
            dataset.report_loss,
            end_id,
            set_first_weights=fill_,
        )
    else:
        from trainer.run.node.ranked import LeadingReplica

        parallel = choose_parallel(wanted_parallel(config), shape, memory_bytes, place)
        logger.info("%d ranks on %d machines share the model: %s", place.size, place.num_hosts, parallel)
        replica = LeadingReplica(
            resolved,
            shape,
            collective,
            device,
            batches,
            num_ids,
            dataset.report_loss,
            end_id,
            set_first_weights=fill_,
            ranks=node_ranks,
            kind=parallel,
            awaits_checkpoint=saved is not None,
        )
    if peers is not None and replica.gradients is not None:
        from trainer.run.node.gradients import NodeProgress, target_tokens_of_node

        replica.gradients.progress = NodeProgress(peers, replica.gradients, target_tokens_of_node(resolved))
    peak = peak_of(device, resolved.inner.precision)
    meter = SpeedMeter(flops_per_token(shape, resolved.inner.seq_len), peak, num_devices=place.size)
    curve_id = _curve_id(resolved, ranks, saved)
    first_step = saved.training_rounds if saved is not None else 0
    curves = _curves(resolved, curve_id, first_step) if ranks.rank == 0 else None
    gauges = tuple if bucket is None else bucket.gauges
    watch = Watch(resolved, network, stop.ask, gauges, speed=meter, curves=curves)
    watch.about = {
        "peer_id": network.peer_id if network is not None else "",
        "first_step": first_step,
        "num_parameters": num_parameters(shape),
        "flops_per_token": flops_per_token(shape, resolved.inner.seq_len),
        "num_devices": place.size,
        "peak": {"device": peak.device, "kind": peak.kind, "flops_per_s": peak.flops_per_s},
        "model": shape.to_dict(),
    }
    if peers is not None:
        from trainer.run.node.reporting import NodeFigures

        peers.figures = NodeFigures(watch, "node", flops_per_token(shape, resolved.inner.seq_len))
    if saved is not None:
        replica.load(saved)
        dataset.load_state_dict(saved.loader["stream"])
        watch.tracker.load_state_dict(saved.loader["tracker"])
        logger.info("going on from step %d of %s", replica.inner.step_index, checkpointer.path)
    replica.refreshed(dataset.state_dict())
    logger.info(
        "%s: %s parameters, %d rows of %d tokens a step, on %s (%.3g TFLOP/s, %s)",
        resolved.node_id,
        f"{num_parameters(shape):,}",
        resolved.inner.micro_batch_size * resolved.inner.accumulation_steps,
        resolved.inner.seq_len,
        device,
        peak.flops_per_s / 1e12,
        peak.kind,
    )
    evaluator = _evaluator(resolved, session, store, device)
    if ranks.in_cluster:
        evaluator.prepare()
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
        signed_run=run,
        evaluator=evaluator,
        curve_id=curve_id,
        current_loss=float("nan") if saved is None else saved.current_loss,
        awaits_state=origin.awaits_state,
    )


def _check_ranks(ranks: Ranks, origin: Origin) -> None:
    """Raises `CheckpointMismatchError` where ranks begin with different weights."""
    number = int(origin.choice.init_digest[:12] or "0", 16)
    least, most = ranks.least(number), -ranks.least(-number)  # Every rank asks both, whatever it finds.
    if least != most:
        raise CheckpointMismatchError(
            "expected every rank to begin with the same weights, found different ones; give all machines the same "
            "--init-from"
        )


def _evaluator(config: RunConfig, session: Session, store: StoreWatch, device: torch.device) -> Evaluator:
    def read() -> HeldOut:
        return HeldOut.of(
            session,
            holdout=config.data.holdout,
            seq_len=config.inner.seq_len,
            num_tokens=config.eval.tokens,
            sources=tuple(config.data.sources),
        )

    return Evaluator(
        config=config.eval,
        read=read if config.data.holdout else None,
        vocabulary=lambda: store.vocabulary,
        device=device,
        rows=config.inner.micro_batch_size,
        round_steps=config.outer.inner_steps,
        autocast=autocast_for(device, config.inner.precision),
        seed=config.seed,
    )


def _curve_id(config: RunConfig, ranks: Ranks, saved: CheckpointContents | None) -> str:
    """Returns what the node's curves are known by: that of its checkpoint, else a new one if it is to draw any."""
    known = saved.loader.get("curve_id", "") if saved is not None else ""
    return str(known) or (secrets.token_hex(4) if config.log.to and ranks.rank == 0 else "")


def _curves(config: RunConfig, curve_id: str, first_step: int) -> CurveLog | None:
    if not config.log.to:
        return None
    folder = config.log.curves_dir or Path(config.log.directory or config.state_dir) / "curves"
    curve = Curve(
        id=curve_id,
        name=config.node_id,
        group=config.run_id,
        project=config.log.project,
        folder=Path(folder).expanduser().absolute(),
        first_step=first_step,
        options=to_mapping(config),
    )
    return CurveLog(config.log.to, curve, config.log.every_steps)


def _warn_of_shortage(
    config: RunConfig, shape: ModelConfig, memory_bytes: Callable[[], int], *, shared_memory: bool
) -> None:
    each = SHARED_BYTES_PER_PARAMETER - TRAINING_BYTES_PER_PARAMETER if shared_memory else 0
    try:
        found = shortage(shape, config.inner, memory_bytes(), each * num_parameters(shape))
    except TrainerUsageError:
        return  # Nobody knows how much there is.
    if found:
        logger.warning("%s", found)


def _signed_run(config: RunConfig, ranks: Ranks) -> SignedRun | None:
    """Opens the signed run that a node belongs to, if it does, for the node to go by its changes."""
    if not config.run_digest:
        return None
    from trainer.run.signed import SignedRun  # Brings grpc, which a node alone does not need.

    run = SignedRun.open(config)
    if run is not None and ranks.in_cluster and run.chain.newest:
        raise TrainerUsageError(
            f"engine torch: expected a run without changes, since ranks hear of none, found {run.chain.newest} in "
            f"{config.run_id}; take engine p2p"
        )
    return None if ranks.in_cluster else run


def _collective(
    config: RunConfig,
    shape: ModelConfig,
    store: StoreWatch,
    ranks: Ranks,
    stop: StopRequest,
    stack: ExitStack,
    run: SignedRun | None,
) -> tuple[Collective, Network[Any] | BucketNetwork | None]:
    if ranks.in_cluster:
        collective = cluster_collective(config)
        stack.callback(collective.close)
        return collective, None
    meets_others = config.discovery.initial_peers or config.rpc.port or config.relay.through or config.bucket.is_used
    if not meets_others:
        return LocalCollective(config.node_id), None

    # These bring grpc, which a node alone does not need.
    from trainer.run.node.identity import identity_of, terms_of
    from trainer.run.node.network import Network
    from trainer.run.node.state_form import StateFit, grad_fit

    max_bytes = int(_GROWTH * _STATE_BYTES_PER_PARAMETER * num_parameters(shape))
    fit: StateForm[Any] = StateFit(shape, config.outer.num_fragments, max_bytes)
    if config.strategy == "grad":
        fit = grad_fit(shape, config.powersgd_rank)
    terms = terms_of(config, shape, store.vocabulary)
    if config.bucket.is_used:
        from trainer.run.node.bucket_network import BucketNetwork

        bucket = BucketNetwork(config, identity_of(config), terms, store.rows, fit, stopping=stop)
        return bucket.collective, bucket
    network = Network(config, identity_of(config), terms, store.rows, fit, stopping=stop, run=run)
    return network.collective, network


def _kinds_of(network: Network[Any] | BucketNetwork | None) -> tuple[Network[Any] | None, BucketNetwork | None]:
    """Returns it as what it is: a network of peers, or a bucket."""
    if network is None:
        return None, None
    from trainer.run.node.bucket_network import BucketNetwork

    return (None, network) if isinstance(network, BucketNetwork) else (network, None)


def _write_config(config: RunConfig, path: Path) -> None:
    text = to_yaml(config)
    try:
        with TemporaryFile(path.parent) as file:
            file.write(memoryview(text.encode()))
            file.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    changed = "  ".join(f"{name}={value}" for name, value in changed_options(config).items())
    logger.info("configuration: %s  (all of it: %s)", changed, path)
    logger.debug("%s", text)
