"""`RunConfig`: the options of one node's run, each part defined beside what it configures.

`SwarmConfig` is the part about a model cut into stages (spec P-40, P-41, P-43). Values that are out of range or do not
go together are a `TrainerUsageError`.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loader.stream.assignment import Assignment
from loader.stream.plateau import PlateauKind
from trainer.aggregation.config import RuleConfig, require_sparse_rule
from trainer.bucket_rounds.config import BucketConfig
from trainer.checkpoint.stages.config import StagewiseConfig
from trainer.collective.config import CollectiveConfig
from trainer.compression import DEFAULT_RANK
from trainer.errors import TrainerUsageError
from trainer.evaluation.config import EvalConfig
from trainer.inner.config import InnerConfig
from trainer.inner.rank_place import Parallel
from trainer.model.choice import ModelChoice
from trainer.model.subspace.config import SubspaceConfig
from trainer.monitor import ApiConfig, LoggerName
from trainer.network.discovery import DiscoveryConfig
from trainer.network.discovery.stage_report import MAX_PARTS
from trainer.network.relay.config import RelayConfig
from trainer.network.rpc import RpcConfig
from trainer.network.rpc.config import has_port, split_address
from trainer.network.rpc.dialing import is_private_host
from trainer.network.transfer.config import StateConfig
from trainer.outer.diloco.config import DiLoCoConfig
from trainer.outer.grad.config import GradConfig
from trainer.outer.sparseloco.config import SparseLoCoConfig
from trainer.outer.sparta.config import SpartaConfig
from trainer.pipeline.driver.config import DriverConfig
from trainer.pipeline.ledger.config import LedgerConfig
from trainer.pipeline.stage.config import StageConfig
from trainer.pipeline.worker.config import WorkerConfig
from trainer.run.config.admission import AdmissionConfig
from trainer.run.config.reading import SECRET

if TYPE_CHECKING:
    from trainer.aggregation import Weighing

_EVERY_INTERFACE = ("0.0.0.0", "::", "")
_NAME = re.compile(r"[A-Za-z0-9_@:+=-][A-Za-z0-9_.@:+=-]{0,127}")
"""Of nodes and runs: folders and files are named by them."""
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")

Engine = Literal["p2p", "torch"]
Strategy = Literal["diloco", "sparseloco", "ddp", "async_sparta", "grad"]
Pipeline = Literal["none", "swarm"]


def _default_store() -> str:
    return os.environ.get("GENESIS_STORE") or str(Path("~/.neuroshard/genesis-store").expanduser())


def _require_least(config: Any, section: str, **least: int) -> None:
    for name, bound in least.items():
        if getattr(config, name) < bound:
            raise TrainerUsageError(f"{section}{name}: expected {bound} or more, found {getattr(config, name)}")


def keeper_option(key: str) -> str:
    """The lines of a run file that name a swarm's keeper."""
    return f"swarm: {{ledger: {{keeper: {key}}}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens are read."""

    store: str = field(default_factory=_default_store)
    """A folder, ``s3://bucket/prefix`` or ``http(s)://host/prefix``."""
    mirrors: tuple[str, ...] = ()
    """Further addresses of the same store."""
    public_key: str = ""
    """PEM file of the key that must have signed the store's manifest; empty: no signature is required."""
    shards_per_node: int = 10
    """Shards this node is given, of each source (spec L-3)."""
    assignment: Assignment = "modulo"
    """``modulo`` (spec L-2) or ``rendezvous``, which moves few shards when the store grows."""
    sources: dict[str, float] = field(default_factory=dict)
    """Weights by source; empty: all shards alike."""
    holdout: int = 0
    """The first so many shards of every source are not trained on; the loss on them is measured (`eval`)."""
    plateau: PlateauKind = "absolute"
    """When a shard is left early: ``absolute`` (spec L-14), ``relative`` or ``off``."""
    cache_dir: str = ""
    """Where shards are kept; empty: ``GENESIS_CACHE_DIR`` or ``~/.neuroshard/data_cache``."""
    cache_bytes: str = ""
    """How much of them, such as ``20GB``; empty: ``GENESIS_CACHE_BYTES`` or 20 GB."""
    timeout_s: float = 600.0
    """Seconds for which fetching a shard is tried."""
    refresh_s: float = 60.0
    """Seconds between checks of the store for new shards and a larger vocabulary, which are taken up at outer steps; so
    under DDP only at the next start."""

    def __post_init__(self) -> None:
        _require_least(self, "data.", shards_per_node=1, holdout=0)
        for name in ("timeout_s", "refresh_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise TrainerUsageError(f"data.{name}: expected a number of seconds above 0, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the node's state is written, and where."""

    directory: str = "~/.neuroshard/checkpoints"
    """Folder; the file is ``dynamic_node_{wallet_id}.pt``."""
    token: str = field(default="", repr=False, metadata=SECRET)
    """Its wallet names the file (spec T-24); empty: the node id does. ``GENESIS_TOKEN`` keeps it off the command line,
    and no file holds it."""
    every_steps: int = 10
    """Inner steps between checkpoints (spec T-25)."""
    keep: int = 3
    """How many are kept, the newest included."""

    def __post_init__(self) -> None:
        _require_least(self, "checkpoint.", every_steps=1, keep=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Where events of a run are logged, for programs to read, and curves, for people."""

    directory: str = ""
    """Folder for one JSON-lines file a node; empty: none is written."""
    to: tuple[LoggerName, ...] = ()
    """Libraries that draw curves: ``tensorboard``, ``wandb``, ``trackio``; each is an extra of its own."""
    project: str = "genesis"
    """What wandb and trackio file the run under."""
    curves_dir: str = ""
    """Folder for the files of these libraries; empty: ``curves`` in ``directory``, or else in ``state_dir``."""
    every_steps: int = 10
    """Steps between two points of a curve."""

    def __post_init__(self) -> None:
        _require_least(self, "log.", every_steps=1)
        if len(set(self.to)) != len(self.to) or not self.project:
            raise TrainerUsageError(
                f"log.to, log.project: expected each library once and a name, found {', '.join(self.to) or 'none'} and "
                f"{self.project!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When a node takes itself out to take up the others' state, and when it gives up."""

    max_withdrawals: int = 3
    """Times in a row, without a round with others in between; the last ends the process with exit code 1. 0: never."""
    max_failed_rounds: int = 2
    """Failed rounds in a row, while the others went on, of a node that holds a whole model; workers of a stage have
    `swarm.join.max_failed_rounds`."""
    max_skipped_steps: int = 3
    """Steps in a row whose loss or gradient is not finite, if there are others with a state to take up; 0: only
    `inner.max_skipped_in_a_row` matters."""
    max_loss_ratio: float = 3.0
    """Of a node's loss, over some 50 steps, to the median of two others or more; 0: is not compared. Nodes on code and
    on prose differ by up to three times."""

    def __post_init__(self) -> None:
        _require_least(self, "health.", max_withdrawals=0, max_failed_rounds=1, max_skipped_steps=0)
        ratio = self.max_loss_ratio
        if not (math.isfinite(ratio) and (ratio == 0 or ratio > 1)):
            raise TrainerUsageError(f"health.max_loss_ratio: expected 0 or more than 1, found {ratio}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceConfig:
    """When a worker whose stage nobody has chosen for it (``--stage auto``) moves to another one."""

    enabled: bool = True
    """Whether it ever does."""
    min_gain: float = 0.1
    """Share by which the slowest stage has to do more afterwards."""
    horizon_s: float = 900.0
    """How long a gain is expected to last: in that time it has to be more than what moving costs."""
    patience_s: float = 30.0
    """How long it has to be so, without anybody coming or going in the two stages."""
    stay_s: float = 120.0
    """How long a worker stays in a stage at least."""
    link_bytes_per_s: float = 10e6
    """At which a stage's state is taken to be fetched, until this process has fetched one and knows."""

    def __post_init__(self) -> None:
        for name in ("min_gain", "horizon_s", "patience_s", "stay_s", "link_bytes_per_s"):
            value = getattr(self, name)
            is_positive = value > 0 or (value == 0 and name in ("patience_s", "stay_s"))
            if not (math.isfinite(value) and is_positive):
                raise TrainerUsageError(f"swarm.rebalance.{name}: expected a number above 0, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinConfig:
    """How workers of a stage come and go."""

    window: float = 0.1
    """Share of a round, from its beginning, in which a newcomer may take up the stage's state (spec P-43)."""
    max_rounds_behind: int = 5
    """A newcomer that is further behind when it has the state fetches a newer one (spec P-43); for SPARTA."""
    max_failed_rounds: int = 2
    """Failed rounds in a row, while the others went on, after which a worker takes up their state (spec P-41)."""
    idle_s: float = 20.0
    """A stage whose round has not moved for so long waits for no other worker."""
    first_peers_s: float = 6.0
    """How long a worker looks for others of its stage before it acts as the first."""
    leave_s: float = 30.0
    """How long a stopping worker may take to finish its micro-batches and share its state."""

    def __post_init__(self) -> None:
        if not 0 < self.window <= 1:
            raise TrainerUsageError(f"swarm.join.window: expected more than 0 and at most 1, found {self.window}")
        _require_least(self, "swarm.join.", max_rounds_behind=1, max_failed_rounds=1)
        for name in ("idle_s", "first_peers_s", "leave_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise TrainerUsageError(f"swarm.join.{name}: expected seconds, 0 or more, found {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """A pipeline of stages; the same run file at all workers and drivers."""

    num_stages: int = 3
    """Head, tail, and bodies between them."""
    layers: tuple[int, ...] = ()
    """Of each stage; empty: by ``cut``."""
    cut: Literal["even", "memory"] = "even"
    """``even`` shares of the layers, or so that the stage with the most parameters has as few as can be."""
    whole_nodes: bool = False
    """Nodes that hold the whole model take part in the rounds of all stages, beside their workers (docs/swarm.md)."""
    vocab_rows: int = 0
    """Rows of the embedding, a multiple of 1,024; 0: as many as the store's vocabulary needs."""
    activation_codec: str = "fp32"
    """On the links: fp32, fp16, int8; with a subspace also subspace, subspace+fp16, subspace+int8."""
    start_from: str = ""
    """Folder of a checkpoint of Hugging Face or torchtitan to begin with; empty: first weights by the seed."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    driver: DriverConfig = field(default_factory=DriverConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    sparta: SpartaConfig = field(default_factory=SpartaConfig)
    checkpoint: StagewiseConfig = field(default_factory=StagewiseConfig)
    join: JoinConfig = field(default_factory=JoinConfig)
    rebalance: RebalanceConfig = field(default_factory=RebalanceConfig)

    def __post_init__(self) -> None:
        _require_least(self, "swarm.", num_stages=2)
        if self.vocab_rows < 0 or self.vocab_rows % 1024:
            raise TrainerUsageError(f"swarm.vocab_rows: expected 0 or a multiple of 1024, found {self.vocab_rows}")
        if self.activation_codec.startswith("subspace") and not self.subspace.rank:
            raise TrainerUsageError(
                f"swarm.activation_codec: expected swarm.subspace.rank with {self.activation_codec}, found none"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One node's run; YAML has the same names in the same nesting."""

    node_id: str = ""
    """Name of this node: decides its shards and their order. A node needs one to train."""
    run_id: str = "genesis"
    """Nodes of one run train one model together."""
    run_digest: str = ""
    """Digest of the signed run file that the node was given (``--run``), set by itself; empty: of none."""
    seed: int = 0
    """Of the weights and of the data's order; the same for all nodes of a run."""
    engine: Engine = "p2p"
    """``p2p``: among strangers, or alone. ``torch``: torch.distributed, under torchrun."""
    strategy: Strategy = "diloco"
    """``diloco``; ``sparseloco``: as ``diloco``, with the greatest 1.6 % of each change in two bits; ``grad``:
    gradients averaged over all nodes, or all workers of a stage, before each step they take together; with the torch
    engine ``ddp``: the same among ranks, the baseline; among the workers of a stage also ``async_sparta``: a slice of
    the parameters averaged now and then, in the background."""
    parallel: Parallel = "auto"
    """How the ranks that torchrun starts as one node share its model, with the engine p2p: ``ddp``, each has all of it;
    ``fsdp``, each a shard; ``hsdp``, a shard within each of several machines. ``auto``: by memory."""
    pipeline: Pipeline = "none"
    """``swarm``: this node drives a pipeline of workers, and holds no parameters itself."""
    max_steps: int = 0
    """Inner steps after which the node stops; 0: goes on."""
    max_tokens: int = 0
    """Tokens of its steps after which the node stops, those of the run before it joined counted too; 0: goes on."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, ``cuda:1``."""
    threads: int = 0
    """Threads torch computes with on a CPU; 0: its own choice. Fixed threads make a run repeatable bit for bit."""
    state_dir: str = "~/.neuroshard"
    """Folder for the node's key, the shared state others fetch, and logs."""
    model: ModelChoice = field(default_factory=ModelChoice)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)
    sparseloco: SparseLoCoConfig = field(default_factory=SparseLoCoConfig)
    grad: GradConfig = field(default_factory=GradConfig)
    rule: RuleConfig = field(default_factory=RuleConfig)
    collective: CollectiveConfig = field(default_factory=CollectiveConfig)
    bucket: BucketConfig = field(default_factory=BucketConfig)
    rpc: RpcConfig = field(default_factory=RpcConfig)
    relay: RelayConfig = field(default_factory=RelayConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig)
    state: StateConfig = field(default_factory=StateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)

    def __post_init__(self) -> None:
        _require_least(self, "", max_steps=0, max_tokens=0, threads=0)
        for name in ("node_id", "run_id"):
            value = getattr(self, name)
            if not _NAME.fullmatch(value) and (value or name == "run_id"):
                raise TrainerUsageError(
                    f"{name}: expected 1 to 128 letters, digits or any of -_.@:+= (no dot first), found {value!r}"
                )
        if not _DIGEST.fullmatch(self.run_digest):
            raise TrainerUsageError(
                f"run_digest: expected nothing, since --run with a signed run file sets it, found {self.run_digest!r}"
            )
        if self.engine != "torch" and self.strategy == "ddp":
            raise TrainerUsageError("strategy ddp: expected engine torch (under torchrun), found engine p2p")
        if self.strategy == "grad":
            self._check_grad()
        if self.strategy == "sparseloco":
            require_sparse_rule(self.rule)
            if self.powersgd_rank:
                raise TrainerUsageError(
                    f"collective.powersgd_rank: expected 0 with strategy sparseloco, whose changes are sparse already, "
                    f"found {self.collective.powersgd_rank}"
                )
        elif self.collective.compression == "sparse":
            raise TrainerUsageError(
                f"collective.compression sparse: expected strategy sparseloco, whose error feedback and rule it needs, "
                f"found strategy {self.strategy}"
            )
        if self.powersgd_rank and self.strategy in ("ddp", "async_sparta"):
            raise TrainerUsageError(
                f"collective.powersgd_rank: expected 0 with strategy {self.strategy}, found "
                f"{self.collective.powersgd_rank}; ddp averages inside torch, and SPARTA averages parameters, whose "
                "matrices would be replaced by some of low rank: factors are for changes (strategy diloco)"
            )
        if self.engine == "torch" and self.parallel != "auto":
            raise TrainerUsageError(
                f"parallel {self.parallel}: expected engine p2p, whose ranks are one node, found engine torch, whose "
                "ranks are nodes of their own; leave one of the two out"
            )
        if (self.inner.document_mask or self.inner.fp8) and self.pipeline == "swarm":
            raise TrainerUsageError(
                "inner.document_mask, inner.fp8: expected false with pipeline swarm (later stages see no ids, and "
                "workers compare what they compute), found true"
            )
        if self.pipeline == "swarm" and (self.max_tokens or self.log.to):
            raise TrainerUsageError(
                "pipeline swarm: expected neither max_tokens nor log.to, found one of them; its steps have "
                "swarm.stage.target_tokens tokens each: give max_steps, and log_dir for events"
            )
        if self.bucket.is_used:
            self._check_bucket()
        if self.swarm.whole_nodes:
            self._check_whole_nodes()
        if self.collective.quorum:
            self._check_quorum()
        if self.engine == "torch" and self.pipeline == "swarm":
            raise TrainerUsageError("pipeline swarm: expected engine p2p, found engine torch")
        if self.pipeline == "swarm" and self.relay.serve:
            raise TrainerUsageError(
                "pipeline swarm: expected relay.serve false at a driver, which nobody finds as a relay, found true; "
                "let workers serve, or give relay.port and tell the nodes (--relay)"
            )
        if self.engine == "torch" and (self.discovery.initial_peers or self.rpc.port or self.relay.is_used):
            raise TrainerUsageError(
                "engine torch: expected no initial_peers, no port and no relay, since torchrun says who belongs "
                "together, found one; leave it out, or take engine p2p"
            )

    @property
    def powersgd_rank(self) -> int:
        """Columns of PowerSGD's factors; 0: matrices travel whole."""
        chosen = self.collective.powersgd_rank
        return chosen if chosen >= 0 else DEFAULT_RANK if self.strategy == "grad" else 0

    @property
    def discovery_options(self) -> DiscoveryConfig:
        """The options of discovery; a node that others cannot connect to only asks the DHT."""
        if not self.relay.through:
            return self.discovery
        return replace(self.discovery, dht_client_mode=True)

    @property
    def outer(self) -> DiLoCoConfig:
        """Cadence and outer step of the strategies that move a common anchor."""
        return self.sparseloco.cadence() if self.strategy == "sparseloco" else self.diloco

    @property
    def moves_anchor(self) -> bool:
        """Whether nodes train alone for many steps, and then move a common anchor (`trainer.outer.diloco`)."""
        return self.strategy in ("diloco", "sparseloco")

    @property
    def has_common_state(self) -> bool:
        """Whether all members of a round hold one state after it, so that whoever is behind is in none of theirs."""
        return self.moves_anchor or self.strategy == "grad"

    @property
    def residual_decay(self) -> float | None:
        """What is kept of a sparse contribution's error feedback; None: contributions are dense."""
        return self.sparseloco.decay if self.strategy == "sparseloco" else None

    @property
    def weighing(self) -> Weighing:
        """What a member's work weighs in a round.

        Beside whole nodes it is the work itself: the workers of a stage share the tokens that a whole node reads alone.
        With a quorum it counts how fast the member trains, too.
        """
        if self.strategy == "grad" or self.swarm.whole_nodes:
            return "linear"
        return "pace" if self.collective.quorum else "root"

    @property
    def round_options(self) -> CollectiveConfig:
        """The options of this run's rounds; where gradients are averaged, whoever is awaited comes at once."""
        if self.strategy == "sparseloco":
            return replace(self.collective, compression="sparse")
        if self.strategy != "grad":
            return self.collective
        return replace(self.collective, max_weight_ratio=self.grad.max_weight_ratio, invite_after_s=0.0)

    def _check_grad(self) -> None:
        if self.engine == "torch":
            raise TrainerUsageError("strategy grad: expected engine p2p, found engine torch; strategy ddp is its like")
        if self.inner.optimizer != "adamw":
            raise TrainerUsageError(
                f"strategy grad: expected inner.optimizer adamw, whose step all nodes compute with the same bits, "
                f"found {self.inner.optimizer}"
            )
        longest_s = self.collective.stall_timeout_s / 4
        if self.grad.ahead_s > longest_s:
            raise TrainerUsageError(
                f"grad.ahead_s: expected at most a quarter of collective.stall_timeout_s ({longest_s:g} s), in which a "
                f"silent member counts as dead, found {self.grad.ahead_s:g}"
            )

    def _check_whole_nodes(self) -> None:
        if not self.moves_anchor:
            why = (
                "all would wait for the pipelines before each step"
                if self.strategy == "grad"
                else "its replicas keep weights and moments of their own, which a stage's workers count by other steps"
            )
            raise TrainerUsageError(
                f"swarm.whole_nodes: expected strategy diloco or sparseloco, found {self.strategy}: {why}"
            )
        found = [
            *(["engine torch"] if self.engine != "p2p" else []),
            *(["rounds through a bucket (bucket.url)"] if self.bucket.is_used else []),
            *(["swarm.start_from"] if self.swarm.start_from else []),
            *(["inner.document_mask"] if self.inner.document_mask else []),
        ]
        if found:
            raise TrainerUsageError(
                f"swarm.whole_nodes: expected rounds from node to node, of a model with first weights by the seed that "
                f"computes the same whole and in stages, found {', '.join(found)}"
            )
        if not self.inner.micro_batch_size:
            raise TrainerUsageError(
                "swarm.whole_nodes: expected inner.micro_batch_size, since contributions weigh by micro-batches, which "
                "have to have as many rows at whole nodes as in the pipeline; found 0"
            )
        if self.swarm.num_stages > MAX_PARTS:
            raise TrainerUsageError(
                f"swarm.whole_nodes: expected at most {MAX_PARTS} stages, all of which a whole node announces, found "
                f"{self.swarm.num_stages}"
            )

    def _check_quorum(self) -> None:
        because = {
            "grad": "its step is made when the target of tokens is there, whoever brings them: it waits for nobody",
            "async_sparta": "it averages parameters, not work: what comes late would pull the others back, not count",
            "ddp": "all ranks take each step together",
        }.get(self.strategy, "")
        if self.engine == "torch":
            because = because or "its ranks reduce together, or not at all (engine torch)"
        if self.pipeline == "swarm":
            because = because or "the drivers of a pipeline already give slower workers less (pipeline swarm)"
        if self.powersgd_rank:
            because = because or "both phases of a factored round need all members' work (collective.powersgd_rank)"
        if self.swarm.whole_nodes:
            because = because or "a stage's workers have no work of their own to bring later (swarm.whole_nodes)"
        if self.bucket.is_used:
            because = because or "rounds through a bucket have one of their own: bucket.quorum (--rounds)"
        if because:
            raise TrainerUsageError(
                f"collective.quorum: expected 0 with strategy {self.strategy} here, found {self.collective.quorum:g}: "
                f"{because}"
            )

    def _check_bucket(self) -> None:
        found = [
            *([f"engine {self.engine}"] if self.engine != "p2p" else []),
            *([f"pipeline {self.pipeline}"] if self.pipeline != "none" else []),
            *(["a port (rpc.port)"] if self.rpc.port else []),
            *(["peers (discovery.initial_peers)"] if self.discovery.initial_peers else []),
            *(["a relay (relay.through, relay.port, relay.serve)"] if self.relay.is_used else []),
        ]
        if found:
            raise TrainerUsageError(
                f"--rounds: expected a node that holds a whole model and has neither port nor peers, found "
                f"{', '.join(found)}; rounds go through the bucket or from node to node, not both"
            )
        if self.bucket.access == "signed" and not self.admission.is_required:
            raise TrainerUsageError(
                "bucket.access signed: expected a run with an authority, which signs requests for its members "
                "(--authority URL, or a signed run file that names one), found none"
            )
        if not self.moves_anchor:
            raise TrainerUsageError(
                f"--rounds: expected strategy diloco or sparseloco, found {self.strategy}: it averages before each "
                "step, or now and then in slices, and a round through a bucket takes seconds"
            )
        if self.powersgd_rank:
            raise TrainerUsageError(
                "--rounds: expected collective.powersgd_rank 0, since its second factor depends on the first round's "
                f"result, found {self.powersgd_rank}"
            )
        if self.bucket.num_slices:
            self._check_slices()
        if self.rule.validation == "off" and not self.bucket.members and not self.admission.is_required:
            raise TrainerUsageError(
                "--rounds: expected rule.validation log or enforce where anybody who can write to the bucket may take "
                "part, found off; name the nodes (bucket.members), or leave validation on"
            )

    def _check_slices(self) -> None:
        from trainer.bucket_rounds.reducers import require_sliceable  # It brings torch, which other options do without.

        if self.strategy == "sparseloco":
            raise TrainerUsageError(
                "bucket.num_slices: expected 0 with strategy sparseloco, whose rule needs the norm of whole vectors; a "
                f"contribution has 0.17 bits a parameter there; found {self.bucket.num_slices}"
            )
        require_sliceable(self.rule)

    @property
    def is_private(self) -> bool:
        """Whether no stranger can connect, as far as the options say; names stand for keys then.

        It is so with `discovery.allow_private`, and where all addresses this node was given (of its initial peers, and
        the one it is reached at or listens on) are loopback, private or link-local.
        """
        own = self.rpc.public_address
        # ``host:port`` or ``/ip4/HOST/tcp/…``.
        peers = self.discovery.initial_peers
        hosts = [each.split("/")[2] if each.startswith("/") else split_address(each)[0] for each in peers]
        hosts += [split_address(own)[0] if has_port(own) else own] if own else []
        hosts += [self.rpc.host] if not own and self.rpc.host not in _EVERY_INTERFACE else []
        return self.discovery.allow_private or (bool(hosts) and all(map(is_private_host, hosts)))
