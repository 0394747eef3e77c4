"""Whether two workers of a stage computed the same, and whether a worker's gradient is that of its own output.

Replicas of a stage drift apart between averages, are a few steps apart, and the link's codec rounds their answers. So
the comparison is rough, by direction *and* size. Of an activation the stage's own part is compared: with a subspace
codec without the tokens' fixed rows, which nobody computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.pipeline.driver.stage_caller import LinkForm
from trainer.pipeline.protocol.wire import ACTIVATION, GRADIENT, part_of

__all__ = ["MAX_SLOPE_RATIO", "StageOutput", "difference", "midpoint", "nudge", "output_of", "own_part", "slope_ratio"]

MIN_COSINE = 0.3
MAX_RATIO = 4.0
"""Of the larger norm to the smaller one."""
MIN_NATS = 1.0
"""A label; losses are also alike if they differ by less than half."""
MAX_SLOPE_RATIO = 4.0
"""Between the change that a gradient predicts and the one that is seen."""
_NUDGE = 0.05
"""Of each position's norm."""


@dataclass(frozen=True, slots=True, eq=False)
class StageOutput:
    """What a stage made of one input, by one worker's answer."""

    activation: Tensor | None = None
    """Head, body: fp32[B, S, dim], the stage's own part of it."""
    loss: float | None = None
    """Tail: mean of the labels."""
    gradient: Tensor | None = None
    """Body, tail: with respect to the input, fp32[B, S, dim], before the worker scaled it down."""
    version: int = 0
    """Of the weights."""


def output_of(
    form: LinkForm,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    *,
    loss: float | None = None,
    scale: float = 1.0,
    version: int = 0,
) -> StageOutput:
    """Decodes an answer: activation, gradient, both or none, and the mean loss of the labels at the tail.

    The gradient is divided by ``scale``, which the worker says to have multiplied it by.

    Raises:
        CodecError: the tensors are not what the codec makes.
        NonFiniteActivationError: they are not finite.
    """
    activation, gradient = part_of(ACTIVATION, tensors), part_of(GRADIENT, tensors)
    return StageOutput(
        activation=own_part(form, activation, ids) if activation else None,
        loss=loss,
        gradient=form.codec.grad_decode(gradient) / scale if gradient else None,
        version=version,
    )


def difference(one: StageOutput, other: StageOutput) -> str | None:
    """Returns in what two answers differ by more than replicas do, of what is in both; None: they are alike."""
    for what in ("activation", "gradient"):
        found, expected = getattr(one, what), getattr(other, what)
        if found is not None and expected is not None and not _is_alike(found, expected):
            norms = float(found.double().norm()), float(expected.double().norm())
            return f"{what}: cosine {_cosine(found, expected):.2f}, norms {norms[0]:.3g} and {norms[1]:.3g}"
    if one.loss is None or other.loss is None:
        return None
    if abs(one.loss - other.loss) < max(MIN_NATS, max(one.loss, other.loss) / 2):
        return None
    return f"loss: {one.loss:.3f} and {other.loss:.3f} nats a label"


def nudge(own: Tensor, gradient: Tensor) -> Tensor:
    """Returns a step along a gradient, at each position by `_NUDGE` of the input's norm there.

    ``own`` is the part of the input, fp32[B, S, dim], that a stage computed and a link's codec transmits; positions
    where the gradient is zero stay.
    """
    size = _NUDGE * own.norm(dim=-1, keepdim=True)
    norm = gradient.norm(dim=-1, keepdim=True)
    direction = torch.where(norm > 0, gradient / norm.clamp_min(torch.finfo(norm.dtype).tiny), torch.zeros_like(norm))
    step: Tensor = direction * size
    return step


def midpoint(one: StageOutput, other: StageOutput) -> StageOutput:
    """Returns the mean of two answers: up to curvature, the answer to the input in between."""

    def mean(first: Tensor | None, second: Tensor | None) -> Tensor | None:
        return None if first is None or second is None else (first + second) / 2

    loss = None if one.loss is None or other.loss is None else (one.loss + other.loss) / 2
    return StageOutput(mean(one.activation, other.activation), loss, mean(one.gradient, other.gradient), one.version)


def slope_ratio(
    moved: Tensor, gradient: Tensor, ahead: StageOutput, behind: StageOutput, *, grad_y: Tensor | None, num_labels: int
) -> float | None:
    """Returns the change of the losses, seen through the stage's output, per nat that a gradient predicts.

    Args:
        moved: what the input was moved by between ``behind`` and ``ahead``.
        gradient: of the sum of losses with respect to the input, as claimed.
        ahead: the output on one side.
        behind: the output on the other side.
        grad_y: of the sum of losses with respect to the stage's output; None: the output is the loss.
        num_labels: of the loss, at the tail.

    Returns:
        About 1 for an honest worker; None: the gradient predicts no change, or there is no output to see one in.
    """
    predicted = _dot(gradient, moved)
    if grad_y is None:
        if ahead.loss is None or behind.loss is None:
            return None
        seen = (ahead.loss - behind.loss) * num_labels
    else:
        if ahead.activation is None or behind.activation is None:
            return None
        seen = _dot(grad_y, ahead.activation.double() - behind.activation.double())
    return seen / predicted if predicted else None


def own_part(form: LinkForm, tensors: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """Returns what a stage computed of an activation: without what the codec would decode of zeros."""
    decoded = form.codec.decode(tensors, ids)
    if not form.codec.needs_ids:
        return decoded
    zeros = {name: torch.zeros_like(tensor) if name == ACTIVATION else tensor for name, tensor in tensors.items()}
    return decoded - form.codec.decode(zeros, ids)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.vdot(one.double().flatten(), other.double().flatten()))


def _cosine(one: Tensor, other: Tensor) -> float:
    norms = float(one.double().norm()) * float(other.double().norm())
    return _dot(one, other) / norms if norms else float(torch.equal(one, other))


def _is_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may be those of two replicas; some initial weights give zeros, which are alike."""
    norms = sorted((float(one.double().norm()), float(other.double().norm())))
    return _cosine(one, other) >= MIN_COSINE and norms[1] <= MAX_RATIO * norms[0]
