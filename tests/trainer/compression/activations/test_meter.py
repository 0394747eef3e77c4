from __future__ import annotations

import logging

import pytest
import torch

from trainer.compression.activations import LinkMeter, activation_codec
from trainer.errors import TrainerUsageError
from trainer.model.subspace import basis_of, fixed_table

_BASIS, _FIXED = basis_of(16, 2, 0), fixed_table(10, 16, 0, 0.2)
_IDS = torch.arange(8).view(2, 4)
_WITHIN = _FIXED[_IDS] + torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(1)) @ _BASIS.matrix.T
_STRAYED = _WITHIN + 0.1 * torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _send(meter: LinkMeter, codec_name: str, hidden: torch.Tensor) -> float | None:
    codec = activation_codec(codec_name, _BASIS, _FIXED)
    return meter.activation(hidden, _IDS, codec.encode(hidden, _IDS))


def _meter(codec_name: str, **options: object) -> LinkMeter:
    return LinkMeter("head → tail", activation_codec(codec_name, _BASIS, _FIXED), 0.01, **options)  # type: ignore[arg-type]


def test_bytes_of_activations_and_gradients_are_counted():
    meter, codec = _meter("subspace"), activation_codec("subspace", _BASIS, _FIXED)
    assert meter.figures().ratio == 1.0

    _send(meter, "subspace", _WITHIN)
    meter.gradient(codec.grad_encode(_WITHIN))

    figures = meter.figures()
    assert (figures.raw_bytes, figures.wire_bytes, figures.num_tensors) == (2 * 8 * 16 * 4, 2 * 8 * 2 * 4, 2)
    assert figures.ratio == 8.0


@pytest.mark.parametrize("codec_name", ["fp32", "fp16", "int8", "subspace", "subspace+fp16", "subspace+int8"])
def test_a_constrained_model_raises_no_alarm(codec_name: str):
    meter = _meter(codec_name, every=1)

    for _ in range(5):
        _send(meter, codec_name, _WITHIN)

    figures = meter.figures()
    assert figures.alarms == 0 and figures.error < 0.02
    assert (figures.error < 1e-6) == (codec_name in ("fp32", "subspace"))


@pytest.mark.parametrize("codec_name", ["subspace", "subspace+int8"])
def test_a_model_that_has_strayed_is_counted_and_said_once_a_minute(codec_name: str, caplog: pytest.LogCaptureFixture):
    clock = _Clock()
    meter = _meter(codec_name, every=1, clock=clock)

    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            _send(meter, codec_name, _STRAYED)
            clock.now_s += 10
        assert len(caplog.records) == 1
        clock.now_s += 30
        _send(meter, codec_name, _STRAYED)

    assert len(caplog.records) == 2
    assert "head → tail" in caplog.records[1].message and "5 times" in caplog.records[1].message
    assert meter.figures().alarms == 5
    assert meter.figures().max_error >= meter.figures().error > 0.05


def test_only_every_so_many_activations_are_measured():
    meter = _meter("subspace", every=3)

    measured = [_send(meter, "subspace", _WITHIN) is not None for _ in range(7)]

    assert measured == [True, False, False, True, False, False, True]


def test_the_average_follows_slowly():
    meter = _meter("subspace", every=1)
    for hidden in (_WITHIN, _STRAYED):
        _send(meter, "subspace", hidden)

    figures = meter.figures()
    assert 0.05 * figures.max_error < figures.error < 0.2 * figures.max_error


def test_numbers_out_of_range_are_refused():
    codec = activation_codec("fp32")
    for max_error, every in ((0.0, 1), (float("nan"), 1), (0.1, 0)):
        with pytest.raises(TrainerUsageError, match="max_error"):
            LinkMeter("a → b", codec, max_error, every=every)
