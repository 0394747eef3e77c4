"""`Replica`: one node's model with its optimizers, built from a configuration, saved, restored and grown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trainer.checkpoint.node import CheckpointContents
from trainer.checkpoint.saver import HostCopy
from trainer.errors import CheckpointMismatchError
from trainer.inner import Batch, InnerLoop, lr_at, make_optimizer, rng_state, set_rng_state
from trainer.inner.fp8 import use_fp8
from trainer.model import (
    VOCAB_STEP,
    ModelConfig,
    Transformer,
    build_model,
    grow_rows,
    grow_vocabulary,
    limit_ids,
    num_parameters,
    within_documents,
)
from trainer.outer.diloco import DiLoCoTrainer, SharedState
from trainer.outer.engine.collective import Collective
from trainer.outer.engine.ddp import EveryStepStrategy, ddp_model
from trainer.outer.engine.strategy import OuterResult, OuterStrategy
from trainer.run.config import RunConfig, to_mapping
from trainer.run.node.data import within_vocabulary
from trainer.run.node.state_form import state_layout

if TYPE_CHECKING:
    from trainer.outer.diloco.parts import PartsTrainer
    from trainer.outer.grad import GradState, GradTrainer
    from trainer.run.node.gradients import GradLoop


class Replica:
    """A model in training on one node; parameters, moments, DiLoCo's vectors and vocabulary change together.

    Ids of ``batches`` without a row in the model are left out. Losses leave the rows behind ``num_ids``, those of the
    newest vocabulary known, out; these change at outer steps alone, and a checkpoint brings its own. ``on_loss`` is
    called with the loss of every batch. ``end_id`` ends documents, for ``inner.document_mask``.
    ``set_first_weights`` changes the seeded weights, before they are used.
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
    ) -> None:
        self.config = config
        self.device = device
        self._collective = collective
        self._batches = within_vocabulary(batches, lambda: self.vocab_rows)
        self._num_ids = num_ids
        self._on_loss = on_loss
        self._end_id = end_id
        self._set_first_weights = set_first_weights
        self.gradients: GradLoop | None = None
        """The loop, under averaged gradients."""
        self.model = self._build(model_config)
        self._set_first_weights = None  # One built anew takes up the others' state, and needs none of its own.
        self._assemble()

    def _build(self, model_config: ModelConfig) -> Transformer:
        checkpointing = self.config.inner.activation_checkpointing
        model = build_model(model_config, self.config.seed, device=self.device, activation_checkpointing=checkpointing)
        limit_ids(model, self._num_ids)
        if self.config.inner.fp8:
            use_fp8(model, num_parameters(model_config), self.device)
        if self.config.inner.document_mask and self._end_id is not None:
            within_documents(model, self._end_id)
        if self._set_first_weights is not None:
            self._set_first_weights(model)
        return model

    def _assemble(self) -> None:
        config = self.config
        self.optimizer = make_optimizer(self.model, config.inner)
        trained = ddp_model(self.model, self.device) if config.strategy == "ddp" else self.model
        self.diloco: DiLoCoTrainer | None = None
        self.strategy: OuterStrategy = EveryStepStrategy()
        self.gradients = None
        if config.strategy == "grad":
            self._assemble_gradients()
            return
        self.inner: InnerLoop = InnerLoop(
            trained, self.optimizer, config.inner, self._batches, self.device, on_loss=self._on_loss
        )
        if config.moves_anchor:
            self.diloco = DiLoCoTrainer(
                self.model,
                config.outer,
                self._collective,
                vocab_rows=self.vocab_rows,
                powersgd_rank=config.powersgd_rank,
                residual_decay=config.residual_decay,
            )
            self.strategy = self.diloco

    def configure(self, config: RunConfig) -> None:
        """Goes on by what a change of the run has put in force: inner and outer options, from the next step on."""
        self.config = config
        self.inner.configure(config.inner)
        if self.diloco is not None:
            self.diloco.configure(config.outer)
        if self.gradients is not None:
            from trainer.run.node.gradients import target_tokens_of_node

            self.gradients.trainer.configure(
                lr_of=lambda num_steps, num_tokens: lr_at(num_steps, config.inner, num_tokens),
                max_norm=config.inner.max_grad_norm,
                target_tokens=target_tokens_of_node(config),
            )

    def _assemble_gradients(self) -> None:
        # Brings the exchange of progress among nodes, which other strategies do not need.
        from trainer.outer.grad import GradTrainer
        from trainer.run.node.gradients import GradLoop, GradStrategy, target_tokens_of_node

        config = self.config

        def make_trainer(loop: GradLoop) -> GradTrainer:
            return GradTrainer(
                self.model,
                config.grad,
                self._collective,
                optimizer=self.optimizer,
                lr_of=lambda num_steps, num_tokens: lr_at(num_steps, config.inner, num_tokens),
                source=loop,
                max_norm=config.inner.max_grad_norm,
                target_tokens=target_tokens_of_node(config),
                powersgd_rank=config.powersgd_rank,
                vocab_rows=self.vocab_rows,
            )

        self.inner = self.gradients = GradLoop(
            self.model,
            self.optimizer,
            config.inner,
            self._batches,
            self.device,
            on_loss=self._on_loss,
            make_trainer=make_trainer,
        )
        self.strategy = GradStrategy(self.gradients)

    @property
    def sharing(self) -> DiLoCoTrainer | GradTrainer | PartsTrainer | None:
        """What holds the state that this node has in common with others; None: it has none."""
        return self.gradients.trainer if self.gradients is not None else self.diloco

    def after_inner_step(self, num_batches: int) -> tuple[OuterResult, ...]:
        """Counts a step of so many batches, and goes on with rounds; returns those that ended."""
        ended = self.strategy.after_inner_step(num_batches)
        return () if ended is None else (ended,)

    def drain(self) -> tuple[OuterResult, ...]:
        """Waits for the rounds under way; returns them."""
        ended = self.strategy.drain()
        return () if ended is None else (ended,)

    def outer_step_of(self, part: str) -> int | None:
        """Outer steps of a part of the model that has rounds of its own, or of the model; None: it makes none."""
        del part
        return None if self.diloco is None else self.diloco.outer_step

    def measured(self) -> AbstractContextManager[Transformer]:
        """Encloses forward passes of the model outside training."""
        return nullcontext(self.model)

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and output now."""
        return self.model.config.vocab_size

    def adopt(self, shared: SharedState | GradState, *, keep_work: bool = False) -> None:
        """Takes up the others' state: parameters become the anchor, the schedule continues where theirs is.

        AdamW's moments stay: they nearly fit; with another vocabulary they begin anew. Raises `IncompatiblePeerError`,
        and changes nothing, where it is not of this architecture. With ``keep_work``, see `DiLoCoTrainer.adopt`.
        """
        if self.gradients is not None and not isinstance(shared, SharedState):
            self.gradients.trainer.adopt(shared)
            self.inner.set_step(shared.num_steps)
        if self.diloco is None or not isinstance(shared, SharedState):
            return
        if shared.vocab_rows != self.vocab_rows:
            model_config = replace(self.model.config, vocab_size=shared.vocab_rows)
            layout = state_layout(model_config, self.config.outer.num_fragments)
            layout.require_same(shared.layout_digest, "the state to adopt")
            keep_work = False
            self.model = self._build(model_config)
            self._assemble()
        self.diloco.adopt(shared, keep_work=keep_work)
        if not self.diloco.unshared[0]:  # Otherwise it goes on with its own work.
            self.inner.set_step(shared.num_inner_steps)

    def grow(self, rows: int, num_ids: int) -> None:
        """Gives the vocabulary more ids, and rows, everywhere at once; the old ones stay bit for bit.

        ``rows``, the least that a member named, is rounded down to whole steps; a vocabulary does not shrink. Of
        ``num_ids``, those of the newest vocabulary known, those without a row stay out of the losses.
        """
        rows = rows // VOCAB_STEP * VOCAB_STEP
        self._num_ids = max(self._num_ids, num_ids)
        if rows <= self.vocab_rows or self.gradients is not None:  # Under averaged gradients the rows stay.
            limit_ids(self.model, self._num_ids)
            return
        self.strategy.drain()
        names = grow_vocabulary(self.model, rows, self.config.seed)
        for name in names:
            moments = self.optimizer.state.get(self.model.get_parameter(name), {})
            for key, value in moments.items():
                if isinstance(value, Tensor) and value.ndim > 1:
                    moments[key] = grow_rows(value, rows)
        if self.diloco is not None:
            self.diloco.grow(self.model, rows)
        limit_ids(self.model, self._num_ids)

    def contents(self, loader: Mapping[str, Any], current_loss: float) -> CheckpointContents:
        """Returns the contents of a checkpoint; its tensors are the live ones, or marked as never to change."""
        inner = self.inner.state_dict()
        return CheckpointContents(
            layer_ids=tuple(range(self.model.config.num_layers)),
            architecture=self.model.config.to_dict(),
            layers=layers_of(self.model.state_dict()),
            optimizer=inner.pop("optimizer"),
            diloco=self._strategy_state(),
            training_rounds=self.inner.step_index,
            current_loss=current_loss,
            timestamp=time.time(),
            loader=loader,
            rng=rng_state(),
            config=to_mapping(self.config),
            schedule=inner,
            num_ids=self._num_ids,
        )

    def _strategy_state(self) -> dict[str, Any]:
        """Returns the strategy's state without a copy or a wait: DiLoCo's tensors are replaced, and never change."""
        state = dict(self.strategy.state_dict()) if self.diloco is None else self.diloco.state_to_write()
        return with_kept_tensors(state)

    def _load_strategy(self, saved: Mapping[str, Any]) -> None:
        self.strategy.load_state_dict(dict(saved))

    def refreshed(self, loader: Mapping[str, Any]) -> None:
        """Learns that the loader goes on from this state; a model in one process reads nothing but what it is given."""

    def load(self, contents: CheckpointContents) -> None:
        """Resumes from a checkpoint of the same shape and strategy, in a process that has just begun."""
        parameters = parameters_of(contents.layers)
        try:
            self.model.load_state_dict(parameters)
        except RuntimeError as error:
            found = str(error).splitlines()[-1].strip()[:200]
            raise CheckpointMismatchError(
                f"expected a checkpoint of this architecture, found another: {found}"
            ) from error
        if contents.num_ids is not None:
            self._num_ids = contents.num_ids
            limit_ids(self.model, self._num_ids)
        self.inner.load_state_dict(contents.inner_state())
        self._load_strategy(contents.diloco)
        set_rng_state(contents.rng)


def with_kept_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a strategy's state whose tensors never change, marked as such: a checkpoint does not copy them."""
    marked: dict[str, Any] = tree_map_only(Tensor, HostCopy, dict(state))
    return marked


def layers_of(parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Groups parameters by layer (spec T-23): numbered layers, ``embedding`` and ``readout``."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in parameters.items():
        head, _, rest = name.partition(".")
        if head == "layers":
            head, _, rest = rest.partition(".")
        layers.setdefault(head, {})[rest] = value
    return layers


def parameters_of(layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Reverses `layers_of`."""
    return {
        f"layers.{layer}.{name}" if layer.isdigit() else f"{layer}.{name}": value
        for layer, values in layers.items()
        for name, value in values.items()
    }
