"""From a configuration to a node that trains: everything that can go wrong is tried before anything is changed.

The architecture is a preset or shape that was named, or that of the model to begin with; else what the checkpoint was
trained with; else what this machine's memory has room for (spec T-27). The newest whole checkpoint is resumed if it is
of this run; one of another model than was named is put aside. Under torchrun, what ranks read of their machines is
agreed first, as the least of what they found, over a process group of its own (gloo); ranks that a kill left at
different rounds go back to the slowest's.
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
from trainer.checkpoint.files import read_checkpoint
from trainer.checkpoint.node import (
    CheckpointContents,
    Checkpointer,
    checkpoint_path,
    kept_paths,
    load_newest,
    take_over_former_names,
    wallet_id,
)
from trainer.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    PeerUnavailableError,
    TrainerError,
    TrainerUsageError,
)
from trainer.evaluation import Evaluator, HeldOut
from trainer.inner import Batch, autocast_for, batch_size_for, use_device
from trainer.inner.memory import largest_preset, shortage
from trainer.inner.peak import peak_of
from trainer.inner.rank_place import Parallel, RankPlace, choose_parallel, rows_memory_bytes
from trainer.model import ModelConfig, available_memory_bytes, choose_architecture, flops_per_token, num_parameters
from trainer.model.sizing import SHARED_BYTES_PER_PARAMETER, TRAINING_BYTES_PER_PARAMETER
from trainer.monitor import Curve, CurveLog, MeteredIterator, SpeedMeter, require_loggers
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.run.config import RunConfig, changed_options, to_mapping, to_yaml
from trainer.run.node.cluster import Ranks, cluster_collective, joined_cluster, num_processes
from trainer.run.node.data import StoreWatch, endless, open_dataset, open_session
from trainer.run.node.origin import Origin, origin_of
from trainer.run.node.replica import Replica
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

_WEIGHT_BYTES = 4
_NO_POSITION = -1
_ALONE = RankPlace()
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
    saved = _checkpoint_to_resume(config, wallet, ranks)
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


def wanted_parallel(config: RunConfig) -> Parallel:
    """Returns how a node's ranks are to share a model; ``auto`` with Muon, which needs whole matrices, is ``ddp``."""
    return "ddp" if config.parallel == "auto" and config.inner.optimizer == "muon" else config.parallel


def resolve(
    config: RunConfig,
    saved: CheckpointContents | None,
    vocab_rows: int,
    memory_bytes: Callable[[], int],
    *,
    shared_memory: bool,
    place: RankPlace = _ALONE,
    first: ModelConfig | None = None,
) -> tuple[RunConfig, ModelConfig]:
    """Returns the configuration with nothing left to decide, and the model's shape.

    A model that begins anew has ``vocab_rows``, or the shape ``first`` of the model it begins with; ``memory_bytes``,
    what one rank has, is called only where it decides. In ``shared_memory`` (on a CPU) lie both the model and DiLoCo's
    vectors. Rows are those of all of a node's ranks.
    """
    chosen = None if saved is not None else first or config.model.shape(vocab_rows)
    if saved is not None:
        shape = ModelConfig.from_dict(dict(saved.architecture))
    elif chosen is not None:
        shape = chosen
    else:
        shape = _largest_shape(config, memory_bytes(), vocab_rows, shared_memory=shared_memory, place=place)
    if first is not None and shared_memory and (free_bytes := memory_bytes()) < _WEIGHT_BYTES * num_parameters(shape):
        raise TrainerUsageError(
            f"--init-from: expected {_WEIGHT_BYTES * num_parameters(shape):,} bytes of memory for the weights alone, "
            f"found {free_bytes:,}; take a smaller model"
        )
    inner = config.inner
    if inner.seq_len > shape.max_seq_len:
        raise TrainerUsageError(
            f"inner.seq_len: expected at most the {shape.max_seq_len} tokens this architecture is made for, found "
            f"{inner.seq_len}"
        )
    if not inner.micro_batch_size:
        saved_inner = saved.config.get("inner") if saved is not None else None
        rows = saved_inner.get("micro_batch_size") if isinstance(saved_inner, dict) else None
        if not (isinstance(rows, int) and rows):
            checkpointing = inner.activation_checkpointing
            available = memory_bytes()
            if place.size > 1:
                kind = choose_parallel(wanted_parallel(config), shape, memory_bytes, place)
                available = rows_memory_bytes(kind, shape, available, place)
            rows = batch_size_for(available, shape, inner.seq_len, activation_checkpointing=checkpointing) * place.size
        inner = replace(inner, micro_batch_size=rows)
    if inner.micro_batch_size < place.size:
        raise TrainerUsageError(
            f"inner.micro_batch_size: expected a row for each of the node's {place.size} ranks or more, found "
            f"{inner.micro_batch_size}; it counts the rows of all ranks together"
        )
    return replace(config, inner=inner, model=config.model.resolved(shape, config.model.init_digest)), shape


def _largest_shape(
    config: RunConfig, memory_bytes: int, vocab_rows: int, *, shared_memory: bool, place: RankPlace
) -> ModelConfig:
    """Returns the largest preset for what one rank has: on a GPU by the model of a step, on a CPU by the parameter."""
    num_shards = 1 if wanted_parallel(config) == "ddp" else place.local_size
    if shared_memory:
        return choose_architecture(
            num_shards * memory_bytes, vocab_rows, bytes_per_parameter=SHARED_BYTES_PER_PARAMETER
        )
    overlaps = config.moves_anchor and config.outer.overlap_steps > 0 and place.size == 1
    beside = -(-_WEIGHT_BYTES // config.outer.num_fragments) if overlaps else 0  # Snapshot and merge of a round.
    return largest_preset(
        memory_bytes, vocab_rows, config.inner, num_ranks=place.size, num_shards=num_shards, beside=beside
    )


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


def _checkpoint_to_resume(config: RunConfig, wallet: str, ranks: Ranks) -> CheckpointContents | None:
    newest = checkpoint_path(config.checkpoint.directory, wallet, ranks.instance)
    found = load_newest(config.checkpoint.directory, wallet, ranks.instance)
    saved = CheckpointContents.from_mapping(found) if found is not None else None
    if saved is not None:
        for name in ("run_id", "strategy"):
            value, expected = saved.config.get(name), getattr(config, name)
            if value != expected:
                raise CheckpointMismatchError(
                    f"expected a checkpoint of {name} {expected}, found one of {value}; name another folder "
                    f"(--checkpoint-dir), or --{name.replace('_', '-')} {value} to go on with it"
                )
        wrong = config.model.contradicts(ModelConfig.from_dict(dict(saved.architecture)))
        if wrong:
            _put_aside(newest, saved, wrong)
            saved = None
    return _in_step(config, newest, ranks, saved) if ranks.in_cluster else saved


def _put_aside(newest: Path, saved: CheckpointContents, wrong: str) -> None:
    prefix = f"replaced-{int(saved.timestamp)}-"
    for path in (*kept_paths(newest), newest):
        path.rename(path.with_name(prefix + path.name))
    logger.warning(
        "the checkpoint is of another model than was chosen (%s): it was put aside as %s, and training begins anew",
        wrong,
        newest.with_name(prefix + newest.name),
    )


def _in_step(
    config: RunConfig, newest: Path, ranks: Ranks, saved: CheckpointContents | None
) -> CheckpointContents | None:
    """Returns the newest checkpoint of the position that every rank has reached."""
    position = _position(config, saved)
    least, most = ranks.least(position), -ranks.least(-position)
    if least == _NO_POSITION < most:
        raise CheckpointMismatchError(
            "expected a checkpoint of every rank or of none, found some ranks without; start as many ranks as before, "
            f"or begin anew in another --checkpoint-dir than {config.checkpoint.directory}"
        )
    if position == least:
        return saved
    for path in kept_paths(newest):
        try:
            earlier = CheckpointContents.from_mapping(read_checkpoint(path))
        except CorruptCheckpointError as error:
            logger.warning("%s", error)
            continue
        if _position(config, earlier) == least:
            logger.warning("another rank had not come as far: going on from %s", path.name)
            return earlier
    raise CheckpointMismatchError(
        f"{newest}: expected a checkpoint of {'step' if config.strategy == 'ddp' else 'round'} {least}, where another "
        f"rank stands, found only later ones; keep more of them (checkpoint.keep), or begin anew"
    )


def _position(config: RunConfig, saved: CheckpointContents | None) -> int:
    """Returns what ranks must have in common: steps under DDP, committed rounds under DiLoCo."""
    if saved is None:
        return _NO_POSITION
    return saved.training_rounds if config.strategy == "ddp" else int(saved.diloco["round_index"])
