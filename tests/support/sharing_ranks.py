"""Ranks that share one model: a process group of this process alone, and what two ranks decide together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.model_configs import SMALL, batches
from trainer.inner import Batch, InnerConfig, InnerLoop, loop, make_optimizer
from trainer.inner.parallel import RankExchange, local_part, parameters_on_meta, replicate_model, rows_of, shard_model
from trainer.inner.rank_place import RankPlace, Wrapped
from trainer.model import ModelConfig, Transformer, build_model
from trainer.model.config import Recomputation

CPU = torch.device("cpu")
ROWS, SEQ_LEN = 5, 8
POISONED = 3
"""The step at which one rank's loss is not a number."""


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group in which this process is alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_model(
    shape: ModelConfig, place: RankPlace, config: InnerConfig, recomputation: Recomputation | bool = "off"
) -> Transformer:
    """A model in shards, with the weights of a whole one."""
    whole = build_model(shape, 0)
    with parameters_on_meta():
        model = Transformer(shape, activation_checkpointing=recomputation)
    shard_model(model, list(model.layers.values()), place, CPU, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = local_part(parameter)
            if own.numel():  # FSDP cuts rows into equal parts, and the last ranks have what is left.
                most = -(-parameter.shape[0] // place.size)
                own.copy_(whole.get_parameter(name).split(most)[place.rank])
    return model


def ranked_loop(
    kind: Wrapped, place: RankPlace, config: InnerConfig, given: Iterator[Batch], rows: int = ROWS
) -> tuple[InnerLoop, nn.Module]:
    """An inner loop among ranks, and its model without what wraps it; ``rows`` are those of all ranks."""
    recomputation = config.activation_checkpointing
    model = (
        build_model(SMALL, 0, activation_checkpointing=recomputation)
        if kind == "ddp"
        else sharded_model(SMALL, place, config, recomputation)
    )
    wrapped: nn.Module = replicate_model(model, CPU, SEQ_LEN) if kind == "ddp" else model
    exchange = RankExchange(wrapped, kind, place, rows * SEQ_LEN * config.accumulation_steps, CPU)
    own = (rows_of(dict(batch), place) for batch in given)
    optimizer = make_optimizer(model, config)
    inner = InnerLoop(
        wrapped, optimizer, config, own, CPU, exchange=exchange, num_rows=place.most_rows(config.micro_batch_size)
    )
    return inner, model


def some_labels_left_out(seed: int) -> Iterator[Batch]:
    """Batches of which every third has labels that do not count, and every seventh no other."""
    for number, batch in enumerate(batches(seed, num_rows=ROWS, seq_len=SEQ_LEN)):
        labels = batch["labels"].clone()
        if number % 3 == 2:
            labels[1, 2:] = -100
        if number % 7 == 6:
            labels[:] = -100
        yield {"input_ids": batch["input_ids"], "labels": labels}


def decided_steps(rank: int, num_ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Steps of two ranks that are decided on the host, and then on the device; one rank's loss is once no number."""
    place = RankPlace(rank, num_ranks, rank, num_ranks)
    config = InnerConfig(
        lr=1e-2, warmup_steps=2, decay_end_step=100, max_grad_norm=0.5, accumulation_steps=2, micro_batch_size=ROWS
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("ddp", "fsdp"):
        found[kind] = []
        for on_device in (False, True):
            loop.can_decide_on_device = lambda *_, wanted=on_device: wanted  # type: ignore[misc]
            inner, model = ranked_loop(kind, place, config, some_labels_left_out(1))
            found[kind].append(_taken(inner, model, poisoned=rank == 1))
    return found


def _taken(inner: InnerLoop, model: nn.Module, *, poisoned: bool) -> dict[str, Any]:
    def not_a_number(_: nn.Module, __: tuple[Tensor, ...], loss: Tensor) -> Tensor:
        return loss * torch.nan if poisoned and inner.step_index == POISONED else loss

    model.register_forward_hook(not_a_number)
    steps, weights = [], [_weights(model)]
    for _ in range(6):
        result = inner.step()
        steps.append([result.loss, result.grad_norm, float(result.num_tokens), float(result.skipped)])
        weights.append(_weights(model))
    return {"steps": steps, "weights": weights}


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([local_part(each).flatten() for each in model.parameters()]).clone()


def shards_between_passes() -> tuple[list[bool], list[float]]:
    """Whether each parameter has a gradient of its own shard behind a pass that is not a step's last; their norms.

    The norms are of both passes of a step, of one rank.
    """
    place, config = RankPlace(), InnerConfig(micro_batch_size=ROWS, accumulation_steps=2)
    model = sharded_model(SMALL, place, config)
    exchange = RankExchange(model, "fsdp", place, 2 * ROWS * SEQ_LEN, CPU)
    has_shard: list[bool] = []
    for number, batch in enumerate(islice(batches(1, num_rows=ROWS, seq_len=SEQ_LEN), 2)):
        with exchange.forward(is_last=number == 1):
            loss = model(batch["input_ids"], batch["labels"])
        (loss * exchange.share(ROWS * SEQ_LEN)).backward()
        if not number:
            has_shard = [parameter.grad is not None for parameter in model.parameters()]
    return has_shard, [local_part(each.grad).norm().item() for each in model.parameters() if each.grad is not None]


def whole_norms() -> list[float]:
    """The norms that one process has of the same two passes."""
    model = build_model(SMALL, 0)
    for batch in islice(batches(1, num_rows=ROWS, seq_len=SEQ_LEN), 2):
        (model(batch["input_ids"], batch["labels"]) / 2).backward()
    return [each.grad.norm().item() for each in model.parameters() if each.grad is not None]


def short_batches(lengths: Sequence[int]) -> Iterator[Batch]:
    """Batches of so many rows, in a circle."""
    most = max(lengths)
    for number, batch in enumerate(batches(1, num_rows=most, seq_len=SEQ_LEN)):
        keep = lengths[number % len(lengths)]
        yield {name: ids[:keep] for name, ids in batch.items()}
