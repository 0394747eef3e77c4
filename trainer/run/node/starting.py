"""From a configuration to a node that trains: everything that can go wrong is tried before anything is changed.

The architecture is a preset that was named; else what the checkpoint was trained with; else what this machine's memory
has room for (spec T-27). The newest whole checkpoint is resumed if it is of this run; one of another preset than was
named is put aside. Under torchrun, what ranks read of their machines is agreed first, as the least of what they found,
over a process group of its own (gloo); ranks that a kill left at different rounds go back to the slowest's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

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
from trainer.compression.vectors import codec_named
from trainer.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    PeerUnavailableError,
    TrainerError,
    TrainerUsageError,
)
from trainer.inner import batch_size_for, choose_device
from trainer.inner.memory import shortage
from trainer.inner.peak import peak_of
from trainer.model import (
    PRESETS,
    ModelConfig,
    available_memory_bytes,
    choose_architecture,
    flops_per_token,
    num_parameters,
    preset,
)
from trainer.monitor import MeteredIterator, SpeedMeter
from trainer.outer.engine.collective import Collective, LocalCollective
from trainer.outer.engine.torch_collective import RankedBytes, TorchCollective
from trainer.run.config import RunConfig, changed_options, to_yaml
from trainer.run.node.data import StoreWatch, endless, open_dataset, open_session
from trainer.run.node.replica import Replica
from trainer.run.node.stopping import StopRequest
from trainer.run.node.training import Node, TrainingDisplay, Watch

if TYPE_CHECKING:
    from trainer.outer.diloco import SharedState
    from trainer.run.node.network import Network

logger = logging.getLogger(__name__)

_AUTO = "auto"
_BYTES_PER_PARAMETER_ALONE = 16
_BYTES_PER_PARAMETER_SHARED = 32  # On a CPU the anchor, momentum and reference of DiLoCo lie in the same memory.
_NO_POSITION = -1
_STATE_BYTES_PER_PARAMETER = 12  # Anchor, momentum and reference, as they travel to a joiner.
_GROWTH = 1.5  # A run's vocabulary may be larger than this node's first guess.
_NO_MEMORY = "can't allocate memory"
"""What torch's allocator for main memory says; it has no exception class of its own."""
_BACKENDS = ("gloo", "NCCL")
_NUMBER = struct.Struct("<q")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_node(
    config: RunConfig, display: TrainingDisplay, stop: StopRequest, train: Callable[[Node], None] = Node.run
) -> None:
    """Trains as one node until asked to stop; raises `TrainerError` and `LoaderError`, and what was saved is whole.

    ``train`` does something else with the node once it has begun, such as measuring it.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with _torch_errors_mapped(), ExitStack() as stack:
        ranks = stack.enter_context(joined_cluster(config))
        # The process's own generators; weights and data order have seeds of their own.
        seed_text = f"{config.seed}:{ranks.own(config).node_id}"
        seed = int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:4])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        node = _build(config, ranks, display, stop, stack)
        with stop.on_signals():
            node.begin()
            train(node)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of a torchrun job; by default one that belongs to none."""

    rank: int = 0
    local_rank: int = 0
    local_size: int = 1  # Ranks on this machine: they share its memory.
    control: RankedBytes | None = None  # For what the ranks decide; None outside a cluster.

    @property
    def in_cluster(self) -> bool:
        """Whether there are other ranks."""
        return self.control is not None

    @property
    def instance(self) -> str:
        """Distinguishes the ranks' checkpoints."""
        return f"rank-{self.rank}" if self.in_cluster else ""

    def own(self, config: RunConfig) -> RunConfig:
        """Returns the configuration of this rank: data, log and HTTP port of its own."""
        if not self.in_cluster:
            return config
        port = config.api.port + self.local_rank if config.api.port else 0
        return replace(config, node_id=f"{config.node_id}-{self.rank}", api=replace(config.api, port=port))

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values; all have to call it. Raises `PeerUnavailableError` if one is gone."""
        if self.control is None:
            return value
        found = self.control.gather(_NUMBER.pack(value), _NUMBER.size)
        return min(int(_NUMBER.unpack(number)[0]) for number in found)

    def any(self, flag: bool) -> bool:
        """Returns whether a flag is set at any rank; see `least`."""
        return not self.least(not flag)


@contextmanager
def joined_cluster(config: RunConfig) -> Iterator[Ranks]:
    """Joins the process group of the torch engine for as long as the node runs; with the other engine, none."""
    if config.engine != "torch":
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise TrainerUsageError(
                "engine p2p: expected one process a node, found this one to be one of torchrun's; add --engine torch, "
                "or start `python -m trainer`"
            )
        yield Ranks()
        return
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise TrainerUsageError(
            f"engine torch: expected to be started by torchrun, found no {', '.join(missing)}; run "
            "`torchrun --nproc-per-node 8 -m trainer --engine torch ...`"
        )
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.collective.round_timeout_s)
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise TrainerUsageError(f"engine torch: the process group cannot be joined: {error}") from error
    try:
        yield Ranks(
            rank=dist.get_rank(),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            control=RankedBytes(control),
        )
    finally:
        dist.destroy_process_group()


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


def _build(config: RunConfig, ranks: Ranks, display: TrainingDisplay, stop: StopRequest, stack: ExitStack) -> Node:
    device = choose_device(config.device)
    store = StoreWatch(open_session(config.data), config.data.refresh_s)
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
        return ranks.least(found // ranks.local_size if on_cpu else found)

    resolved, shape = resolve(config, saved, ranks.least(store.rows()), memory_bytes, shared_memory=on_cpu)
    if not ranks.in_cluster:
        _warn_of_shortage(resolved, shape, memory_bytes, shared_memory=on_cpu)
    _write_config(resolved, checkpointer.path.with_suffix(".yaml"))
    resolved = ranks.own(resolved)
    dataset = open_dataset(resolved)
    stack.callback(dataset.close)
    batches = MeteredIterator(endless(dataset))
    collective, network = _collective(resolved, shape, store, ranks, stop, stack)
    num_ids = ranks.least(store.num_ids)
    end_id = store.vocabulary.eos_id
    replica = Replica(resolved, shape, collective, device, batches, num_ids, dataset.report_loss, end_id)
    peak = peak_of(device, resolved.inner.precision)
    meter = SpeedMeter(flops_per_token(shape, resolved.inner.seq_len), peak)
    watch = Watch(resolved, network, stop.ask, speed=meter)
    if saved is not None:
        replica.load(saved)
        dataset.load_state_dict(saved.loader["stream"])
        watch.tracker.load_state_dict(saved.loader["tracker"])
        logger.info("going on from step %d of %s", replica.inner.step_index, checkpointer.path)
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
        current_loss=float("nan") if saved is None else saved.current_loss,
    )


def _warn_of_shortage(
    config: RunConfig, shape: ModelConfig, memory_bytes: Callable[[], int], *, shared_memory: bool
) -> None:
    each = _BYTES_PER_PARAMETER_SHARED - _BYTES_PER_PARAMETER_ALONE if shared_memory else 0
    try:
        found = shortage(shape, config.inner, memory_bytes(), each * num_parameters(shape))
    except TrainerUsageError:
        return  # Nobody knows how much there is.
    if found:
        logger.warning("%s", found)


def cluster_collective(config: RunConfig) -> Collective:
    """Returns how ranks make their outer steps; under DDP they make none."""
    if config.strategy == "ddp":
        return LocalCollective(config.node_id)
    codec = codec_named(config.collective.compression)
    return TorchCollective(codec, config.rule, max_weight_ratio=config.collective.max_weight_ratio)


def _collective(
    config: RunConfig, shape: ModelConfig, store: StoreWatch, ranks: Ranks, stop: StopRequest, stack: ExitStack
) -> tuple[Collective, Network[SharedState] | None]:
    if ranks.in_cluster:
        collective = cluster_collective(config)
        stack.callback(collective.close)
        return collective, None
    if not config.discovery.initial_peers and not config.rpc.port:
        return LocalCollective(config.node_id), None

    # These bring grpc, which a node alone does not need.
    from trainer.run.node.identity import identity_of, terms_of
    from trainer.run.node.network import Network
    from trainer.run.node.state_form import StateFit

    max_bytes = int(_GROWTH * _STATE_BYTES_PER_PARAMETER * num_parameters(shape))
    fit = StateFit(shape, config.diloco.num_fragments, max_bytes)
    terms = terms_of(config, shape, store.vocabulary)
    network = Network(config, identity_of(config), terms, store.rows, fit, stopping=stop)
    return network.collective, network


def resolve(
    config: RunConfig,
    saved: CheckpointContents | None,
    vocab_rows: int,
    memory_bytes: Callable[[], int],
    *,
    shared_memory: bool,
) -> tuple[RunConfig, ModelConfig]:
    """Returns the configuration with nothing left to decide, and the model's shape.

    A model that begins anew has ``vocab_rows``; ``memory_bytes`` is called only where it decides. In ``shared_memory``
    (on a CPU) lie both the model and DiLoCo's vectors.
    """
    if saved is not None:
        shape = ModelConfig.from_dict(dict(saved.architecture))
    elif config.model.preset != _AUTO:
        shape = preset(config.model.preset, vocab_rows)
    else:
        each = _BYTES_PER_PARAMETER_SHARED if shared_memory else _BYTES_PER_PARAMETER_ALONE
        shape = choose_architecture(memory_bytes(), vocab_rows, bytes_per_parameter=each)
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
            rows = batch_size_for(memory_bytes(), shape, inner.seq_len, activation_checkpointing=checkpointing)
        inner = replace(inner, micro_batch_size=rows)
    # A shape that is no preset's is ``auto``: the checkpoint decides.
    name = next((name for name in PRESETS if preset(name, shape.vocab_size) == shape), _AUTO)
    return replace(config, inner=inner, model=replace(config.model, preset=name)), shape


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
        shape = ModelConfig.from_dict(dict(saved.architecture))
        if config.model.preset != _AUTO and shape != preset(config.model.preset, shape.vocab_size):
            _put_aside(config, newest, saved)
            saved = None
    return _in_step(config, newest, ranks, saved) if ranks.in_cluster else saved


def _put_aside(config: RunConfig, newest: Path, saved: CheckpointContents) -> None:
    prefix = f"replaced-{int(saved.timestamp)}-"
    for path in (*kept_paths(newest), newest):
        path.rename(path.with_name(prefix + path.name))
    logger.warning(
        "the checkpoint is not of the preset %s: it was put aside as %s, and training begins anew",
        config.model.preset,
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
