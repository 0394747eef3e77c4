"""A small model cut into stage replicas in one process, and micro-batches taken through them by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.inner import InnerConfig, make_optimizer
from trainer.model import ModelConfig, build_stage, stage_ranges
from trainer.pipeline.stage import BackwardResult, StageConfig, StageReplica

CUT = ModelConfig(vocab_size=64, dim=32, num_layers=4, num_heads=2, num_kv_heads=1, ffn_dim=64, max_seq_len=16)
CUT_REORDERED = replace(CUT, qk_norm=True, reorder_norm=True)
INNER = InnerConfig(lr=1e-2, warmup_steps=4, decay_end_step=100)
UNCLIPPED = StageConfig(clip_factor=1e9, tail_clip_factor=1e9)

MicroBatch = tuple[str, Tensor, Tensor]
"""Key, ids, labels."""


def stage_replica(
    index: int,
    num_stages: int,
    config: StageConfig = UNCLIPPED,
    *,
    model: ModelConfig = CUT,
    inner: InnerConfig = INNER,
    seed: int = 0,
    after_update: Callable[[nn.Module], None] | None = None,
) -> StageReplica:
    module = build_stage(model, stage_ranges(model.num_layers, num_stages), index, seed)
    return StageReplica(
        module,
        make_optimizer(module, inner),
        inner,
        config,
        kind="head" if index == 0 else "tail" if index == num_stages - 1 else "body",
        num_stages=num_stages,
        after_update=after_update,
    )


def stage_replicas(num_stages: int, config: StageConfig = UNCLIPPED, **options: Any) -> list[StageReplica]:
    return [stage_replica(index, num_stages, config, **options) for index in range(num_stages)]


def micro_batch(seed: int, rows: int = 2, positions: int = 8, padded: int = 0) -> MicroBatch:
    """Random ids; the labels of the last ``padded`` positions of every row do not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CUT.vocab_size, (rows, positions + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, positions - padded :] = -100
    return f"e0.s0.r{seed}", tokens[:, :-1].clone(), labels


def hidden(seed: int, rows: int = 2, positions: int = 8) -> Tensor:
    return torch.randn(rows, positions, CUT.dim, generator=torch.Generator().manual_seed(seed))


def backward(stage: StageReplica, x: Tensor | None, grad_y: Tensor, key: str = "m", **options: Any) -> BackwardResult:
    """A backward pass of 16 tokens, whose forward pass saw the weights of now."""
    given = {"num_tokens": 16, "forward_version": stage.version, **options}
    return stage.backward(key, x, grad_y, **given)


def count(stage: StageReplica, seed: int = 1, scale: float = 1.0) -> None:
    _, ids, labels = micro_batch(seed)
    if stage.kind == "tail":
        stage.tail("m", hidden(seed), labels)
    else:
        backward(stage, ids if stage.kind == "head" else hidden(seed), scale * hidden(100 + seed))


def carry(stages: Sequence[StageReplica], batch: MicroBatch) -> float:
    """One micro-batch through all stages and back; returns the sum of its losses."""
    key, x, labels = batch
    inputs = []
    for stage in stages[:-1]:
        inputs.append((x, stage.version))
        x = stage.forward(key, x)
    answer = stages[-1].tail(key, x, labels)
    gradient: Tensor | None = answer.grad_hidden
    for stage, (given, version) in reversed(list(zip(stages[:-1], inputs, strict=True))):
        assert gradient is not None
        gradient = stage.backward(key, given, gradient, answer.num_tokens, version).grad_x
    assert gradient is None
    return answer.loss_sum


def sums_of(stages: Sequence[StageReplica]) -> dict[str, Tensor]:
    return {name: total.clone() for stage in stages for name, total in stage.state_dict()["sums"].items()}


def bits_of(stage: StageReplica) -> bytes:
    state = stage.state_dict()
    moments = [value for each in state["optimizer"]["state"].values() for value in each.values()]
    tensors = [*state["module"].values(), *moments, *state["sums"].values()]
    names = ("num_tokens", "num_micro_batches", "loss_sum", "stage_version", "skipped_steps", "skipped_in_a_row")
    values = repr([(name, state[name]) for name in names] + sorted(state["sums"]))
    return b"".join(tensor.numpy().tobytes() for tensor in tensors) + values.encode()
