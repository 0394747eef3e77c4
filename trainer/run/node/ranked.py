"""One node of many GPUs: what each of its ranks holds, how rank 0 leads them, and what the others do.

`RankShare` is every rank's part: the wrapped model, its optimizer, its rows of the node's batches. `LeadingReplica` is
the node's replica as the rest of rank 0 sees it: whatever it does to the model is told to the other ranks first. So
network, rounds, checkpoints and log are those of a node of one process, and so are the files and what peers see.

The ranks wait while rank 0 computes a round, so its arithmetic has the cores of all ranks of its machine for that time,
though torchrun gives each process one.

Each rank reads the whole batch from the store's cache (some 20 µs) and takes its own rows: batches, rotations and
states of the loader are those of one process, whatever the number of ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from loader import GenesisDataset
from trainer.checkpoint.node import CheckpointContents
from trainer.checkpoint.saver import HostCopy
from trainer.errors import CheckpointMismatchError, TrainerError, TrainerUsageError
from trainer.evaluation.held_out import evaluating
from trainer.inner import Batch, InnerConfig, InnerLoop, StepResult, autocast_for, make_optimizer, set_rng_state
from trainer.inner.parallel import RankExchange, parameters_on_meta, replicate_model, rows_of, shard_model
from trainer.inner.rank_place import RankPlace, Wrapped
from trainer.model import (
    VOCAB_STEP,
    ModelConfig,
    Transformer,
    build_model,
    grow_rows,
    grow_vocabulary,
    limit_ids,
    within_documents,
)
from trainer.model.loss import IGNORED_LABEL, filled_up
from trainer.outer.diloco import DiLoCoTrainer, FlatLayout, synchronised_parameters
from trainer.outer.engine.collective import Collective
from trainer.outer.engine.strategy import OuterStrategy
from trainer.run.config import RunConfig, from_mapping, to_mapping
from trainer.run.node.data import endless, open_dataset, within_vocabulary
from trainer.run.node.node_ranks import Message, NodeRanks, RankParameters, Told, return_freed_memory
from trainer.run.node.replica import Replica, layers_of, parameters_of

_MOMENT = "optimizer/{}/{}"


class LeadingLoop(InnerLoop):
    """Rank 0's inner loop, which takes the others along."""

    ranks: NodeRanks

    def step(self) -> StepResult:
        """See `InnerLoop`."""
        self.ranks.tell(Told.STEP)
        return super().step()

    def set_step(self, global_step: int) -> None:
        """See `InnerLoop`."""
        self.ranks.tell(Told.SET_STEP, step=global_step)
        super().set_step(global_step)

    def configure(self, config: InnerConfig) -> None:
        """See `InnerLoop`."""
        self.ranks.tell(Told.CONFIGURE, inner=json.loads(json.dumps(to_mapping(config))))
        super().configure(config)


class RankShare:
    """What one rank holds of its node's replica; every method is called at all ranks, in one order."""

    model: Transformer
    optimizer: torch.optim.Optimizer
    inner: InnerLoop

    def __init__(
        self,
        config: RunConfig,
        ranks: NodeRanks,
        kind: Wrapped,
        device: torch.device,
        batches: Iterator[Batch],
        on_loss: Callable[[float], object],
        end_id: int | None,
    ) -> None:
        self._config = config
        self._end_id = end_id
        self._ranks = ranks
        self._kind = kind
        self._device = device
        self._batches = (rows_of(dict(batch), ranks.place) for batch in batches)
        self._on_loss = on_loss

    def build(self, shape: ModelConfig, num_ids: int) -> None:
        """Builds model, optimizer and loop anew; in shards, parameters have no values yet."""
        inner, place = self._config.inner, self._ranks.place
        if self._kind == "ddp":
            checkpointing = inner.activation_checkpointing
            self.model = build_model(
                shape, self._config.seed, device=self._device, activation_checkpointing=checkpointing
            )
            limit_ids(self.model, num_ids)
            wrapped: torch.nn.Module = replicate_model(self.model, self._device, inner.seq_len)
        else:
            with parameters_on_meta():
                self.model = Transformer(shape, activation_checkpointing=inner.activation_checkpointing)
            limit_ids(self.model, num_ids)
            shard_model(self.model, list(self.model.layers.values()), place, self._device, inner)
            wrapped = self.model
        if inner.document_mask and self._end_id is not None:
            within_documents(self.model, self._end_id)
        self.optimizer = make_optimizer(self.model, inner)
        step_tokens = inner.micro_batch_size * inner.seq_len * inner.accumulation_steps
        exchange = RankExchange(wrapped, self._kind, place, step_tokens, self._device)
        make_loop = InnerLoop if place.rank else LeadingLoop
        self.inner = make_loop(
            wrapped,
            self.optimizer,
            inner,
            self._batches,
            self._device,
            on_loss=self._on_loss,
            exchange=exchange,
            num_rows=place.most_rows(inner.micro_batch_size),
        )
        if isinstance(self.inner, LeadingLoop):
            self.inner.ranks = self._ranks

    def configure(self, inner: InnerConfig) -> None:
        """Goes on by other options of the inner loop, also where the model is built anew."""
        self._config = replace(self._config, inner=inner)
        self.inner.configure(inner)

    def forward(self, inputs: Sequence[Tensor]) -> None:
        """Takes part in a pass of rank 0's outside training."""
        own = self.own_inputs(*inputs)
        with evaluating(self.model), autocast_for(self._device, self._config.inner.precision)():
            self.end_forward(own, self.model(*own))

    def own_inputs(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns this rank's rows of ids and labels, equally many at each rank; without labels all rows."""
        place = self._ranks.place
        if labels is None:
            return (ids.to(self._device),)
        own = rows_of({"ids": ids, "labels": labels}, place)
        filled = filled_up(own["ids"], own["labels"], place.most_rows(len(ids)))
        return tuple(each.to(self._device) for each in filled)

    def end_forward(self, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Returns the mean loss over the rows of all ranks, or scores as they are.

        Lets go of what passes without gradients leave gathered: the next step would not see an outer step.
        """
        if isinstance(self.model, FSDPModule):
            self.model.reshard()
        if len(inputs) < 2:
            return output
        num_tokens = (inputs[1] != IGNORED_LABEL).sum().double()
        sums = torch.stack([output.double() * num_tokens, num_tokens])
        dist.all_reduce(sums)
        return (sums[0] / sums[1].clamp(min=1.0)).float()

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of the training state by name: parameters, and the optimizer's of more than one value."""
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {
                _MOMENT.format(index, key): value
                for key, value in values.items()
                if isinstance(value, Tensor) and value.ndim
            }
        return found

    def load(self, inner: Mapping[str, Any]) -> None:
        """Takes up the inner loop's state; the optimizer's tensors are zeros until `NodeRanks.take`."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {
            int(index): {
                key: torch.zeros_like(parameters[int(index)]) if value is None else torch.tensor(value)
                for key, value in values.items()
            }
            for index, values in inner["optimizer"]["state"].items()
        }
        self.inner.load_state_dict({**inner, "optimizer": {**inner["optimizer"], "state": state}})


class LeadingReplica(Replica):
    """The node's replica at rank 0: its parts are at all ranks, and its files and messages those of one process.

    With ``awaits_checkpoint`` `load` comes next, and weights in shards have no values before.
    """

    def __init__(
        self,
        config: RunConfig,
        model_config: ModelConfig,
        collective: Collective,
        device: torch.device,
        batches: Iterator[Batch],
        num_ids: int,
        on_loss: Callable[[float], object],
        end_id: int | None = None,
        *,
        set_first_weights: Callable[[Transformer], None] | None = None,
        ranks: NodeRanks,
        kind: Wrapped,
        awaits_checkpoint: bool = False,
    ) -> None:
        self._awaits_checkpoint = awaits_checkpoint
        self._ranks = ranks
        self._kind: Wrapped = kind
        own = within_vocabulary(batches, lambda: self.vocab_rows)
        _check_kind(config.inner, kind)
        self._share = RankShare(config, ranks, kind, device, own, on_loss, end_id)
        ranks.tell(Told.BEGIN, config=json.loads(json.dumps(to_mapping(config))), kind=kind, end_id=end_id)
        super().__init__(
            config,
            model_config,
            collective,
            device,
            batches,
            num_ids,
            on_loss,
            end_id,
            set_first_weights=set_first_weights,
        )
        self._awaits_checkpoint = False

    def _build(self, model_config: ModelConfig) -> Transformer:
        self._build_shares(model_config)
        has_first = self._kind == "ddp" and self._set_first_weights is None  # Drawn by the seed at each rank.
        if not has_first and not self._awaits_checkpoint:
            first = build_model(model_config, self.config.seed)
            if self._set_first_weights is not None:
                self._set_first_weights(first)
            self._set(dict(first.named_parameters()))
            del first
            return_freed_memory()
        return self._share.model

    def _build_shares(self, model_config: ModelConfig) -> None:
        self._ranks.tell(Told.BUILD, shape=model_config.to_dict(), num_ids=self._num_ids)
        self._share.build(model_config, self._num_ids)

    def _assemble(self) -> None:
        self.optimizer, self.inner = self._share.optimizer, self._share.inner
        tensors = synchronised_parameters(self.model)
        self.diloco = DiLoCoTrainer(
            self.model,
            self.config.outer,
            self._collective,
            vocab_rows=self.vocab_rows,
            parameters=RankParameters(self._ranks, tensors),
            powersgd_rank=self.config.powersgd_rank,
            residual_decay=self.config.residual_decay,
            num_threads=_lent_threads(self.config.threads, self._ranks.place),
        )
        self.strategy: OuterStrategy = self.diloco

    def configure(self, config: RunConfig) -> None:
        """See `Replica`."""
        self.config = config
        self._share.configure(config.inner)
        if self.diloco is not None:
            self.diloco.configure(config.outer)

    def grow(self, rows: int, num_ids: int) -> None:
        """See `Replica`: the state is taken to the host, grown there, and given to ranks built anew."""
        rows = rows // VOCAB_STEP * VOCAB_STEP
        self._num_ids = max(self._num_ids, num_ids)
        if rows <= self.vocab_rows or self.diloco is None:
            self._limit_ids()
            return
        self.strategy.drain()
        values, inner = self._values(), self._inner_state()
        with torch.device("meta"):
            grown = Transformer(self.model.config)
        for name, _ in list(grown.named_parameters()):
            owner, _, attribute = name.rpartition(".")
            setattr(grown.get_submodule(owner), attribute, torch.nn.Parameter(values[name]))
        if self.model.config.tie_embeddings:
            grown.readout.output.weight = grown.embedding.weight
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        grown_names = set(grow_vocabulary(grown, rows, self.config.seed))
        for index, parameter in enumerate(trained):
            if names[id(parameter)] in grown_names:
                keys = [key for key in values if key.startswith(_MOMENT.format(index, ""))]
                values |= {key: grow_rows(values[key], rows) for key in keys}
        values |= dict(grown.named_parameters())
        self._build_shares(replace(self.model.config, vocab_size=rows))
        self.model = self._share.model
        self.optimizer, self.inner = self._share.optimizer, self._share.inner
        self._load_shares(values, inner)
        self.diloco.grow(grown, rows, RankParameters(self._ranks, synchronised_parameters(self.model)))

    def contents(self, loader: Mapping[str, Any], current_loss: float) -> CheckpointContents:
        """See `Replica`; the tensors are copies."""
        contents = super().contents(loader, current_loss)
        values = {name: HostCopy(value) for name, value in self._values().items()}
        aliases = {id(parameter): name for name, parameter in self.model.named_parameters()}
        named = self.model.named_parameters(remove_duplicate=False)
        layers: Any = layers_of({name: values[aliases[id(parameter)]] for name, parameter in named})  # type: ignore[misc]
        state = {
            index: {key: values.get(_MOMENT.format(index, key), value) for key, value in entry.items()}
            for index, entry in contents.optimizer["state"].items()
        }
        return replace(contents, layers=layers, optimizer={**contents.optimizer, "state": state})

    def load(self, contents: CheckpointContents) -> None:
        """See `Replica`."""
        parameters = parameters_of(contents.layers)
        own = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        found = {name: tuple(parameters[name].shape) for name in own if name in parameters}
        if found != own:
            differing = next(name for name in own if found.get(name) != own[name])
            raise CheckpointMismatchError(
                f"expected a checkpoint of this architecture, found another: {differing} of {found.get(differing)} "
                f"instead of {own[differing]}"
            )
        if contents.num_ids is not None:
            self._num_ids = contents.num_ids
            self._limit_ids()
        values = {name: parameters[name] for name in own}
        optimizer = dict(contents.optimizer)
        for index, entry in optimizer["state"].items():
            moments = {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.ndim}
            values |= {_MOMENT.format(index, key): value for key, value in moments.items()}
        self._load_shares(values, _without_tensors(contents.inner_state()))
        self.strategy.load_state_dict(dict(contents.diloco))
        set_rng_state(contents.rng)

    def refreshed(self, loader: Mapping[str, Any]) -> None:
        """See `Replica`."""
        self._ranks.tell(Told.READ_FROM, state=loader)

    @contextmanager
    def measured(self) -> Iterator[Transformer]:
        """See `Replica`; losses are those of rows that all ranks share, who are told of each pass before it begins."""

        def begin(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if self._kind == "ddp" and len(inputs) < 2:
                return inputs  # Scores are of one row, and this rank has the whole model.
            self._ranks.tell(Told.FORWARD, shapes=[list(each.shape) for each in inputs])
            for each in inputs:
                self._ranks.send(each)
            return self._share.own_inputs(*inputs)

        def end(_: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return self._share.end_forward(inputs, output)

        before = self.model.register_forward_pre_hook(begin, prepend=True)
        behind = self.model.register_forward_hook(end)
        try:
            yield self.model
        finally:
            before.remove()
            behind.remove()

    def _limit_ids(self) -> None:
        self._ranks.tell(Told.LIMIT_IDS, num_ids=self._num_ids)
        limit_ids(self.model, self._num_ids)

    def _set(self, values: Mapping[str, Tensor]) -> None:
        tensors = self._share.tensors()
        layout = FlatLayout.of({name: tensors[name] for name in values})
        self._ranks.take(layout, values, tensors)

    def _values(self) -> dict[str, Tensor]:
        tensors = self._share.tensors()
        layout = FlatLayout.of(tensors)
        # Arrays, since each tensor made of a part of one has a storage of its own: a file holds no more than is named.
        values = self._ranks.filled(layout, tensors).numpy()
        return {name: torch.from_numpy(values[where]).view(shape) for name, shape, where in layout.slices()}

    def _inner_state(self) -> dict[str, Any]:
        return _without_tensors(self.inner.state_dict())

    def _load_shares(self, values: Mapping[str, Tensor], inner: dict[str, Any]) -> None:
        self._ranks.tell(Told.LOAD, inner=inner)
        self._share.load(inner)
        self._set(values)


def _lent_threads(threads: int, place: RankPlace) -> int:
    """Returns torch's threads while the other ranks wait: as many as theirs together, or all cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, threads * place.local_size) if threads else cores


def _check_kind(inner: InnerConfig, kind: Wrapped) -> None:
    """Raises TrainerUsageError where an option of the inner loop cannot be had with ranks."""
    if inner.fp8:
        raise TrainerUsageError("inner.fp8: expected a node of one process, found several ranks; leave it out")
    if inner.optimizer == "muon" and kind != "ddp":
        raise TrainerUsageError(
            f"inner.optimizer muon: expected --parallel ddp, found {kind}: Muon needs whole matrices, of which a rank "
            "has a part; take ddp or adamw"
        )


def _without_tensors(inner: dict[str, Any]) -> dict[str, Any]:
    """Returns the inner loop's state as JSON values: numbers for the optimizer's scalars, None for its tensors."""
    state = {
        index: {
            key: (None if value.ndim else value.item()) if isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
        for index, entry in inner["optimizer"]["state"].items()
    }
    return {**inner, "optimizer": {**inner["optimizer"], "state": state}}


def follow(ranks: NodeRanks, device: torch.device) -> None:
    """Does what rank 0 tells until it tells to stop; raises `PeerUnavailableError` where it is gone."""
    begin = ranks.heard()
    if begin.told is Told.STOP:
        return
    config = from_mapping(RunConfig, begin.details["config"])
    dataset = open_dataset(config)
    try:
        batches = within_vocabulary(endless(dataset), lambda: share.model.config.vocab_size)
        details = begin.details
        share = RankShare(config, ranks, details["kind"], device, batches, dataset.report_loss, details["end_id"])
        while (message := ranks.heard()).told is not Told.STOP:
            _do(message, ranks, share, dataset)
    finally:
        dataset.close()


def _do(message: Message, ranks: NodeRanks, share: RankShare, dataset: GenesisDataset) -> None:
    details = message.details
    match message.told:
        case Told.STEP:
            share.inner.step()
        case Told.FILL | Told.TAKE:
            ranks.follow_vector(message, share.tensors())
        case Told.BUILD:
            share.build(ModelConfig.from_dict(details["shape"]), details["num_ids"])
        case Told.SET_STEP:
            share.inner.set_step(details["step"])
        case Told.CONFIGURE:
            share.configure(from_mapping(InnerConfig, details["inner"]))
        case Told.LOAD:
            share.load(details["inner"])
        case Told.LIMIT_IDS:
            limit_ids(share.model, details["num_ids"])
        case Told.FORWARD:
            share.forward([ranks.receive(shape) for shape in details["shapes"]])
        case Told.READ_FROM:
            dataset.load_state_dict(details["state"])
        case _:
            raise TrainerError(f"rank {ranks.place.rank}: expected something to do, found {message.told.name}")
