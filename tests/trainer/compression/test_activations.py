from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.compression.activations import (
    ACTIVATION_CODECS,
    ActivationCodec,
    Direction,
    LinkMeter,
    activation_codec,
    ids_spec,
)
from trainer.errors import CodecError, NonFiniteActivationError
from trainer.model.subspace import Basis, basis_of, fixed_table
from trainer.network.transfer.descriptor import chunks_of, specs_of, tensors_in

_DIM, _RANK, _NUM_IDS = 24, 4, 50
_BASIS = basis_of(_DIM, _RANK, 1)
_ROTATED = Basis(torch.linalg.qr(torch.randn(_DIM, _RANK, generator=torch.Generator().manual_seed(4))).Q)
"""No coordinates: what a file may bring."""
_FIXED = fixed_table(_NUM_IDS, _DIM, 1, 0.2)
_all_codecs = pytest.mark.parametrize("name", ACTIVATION_CODECS)
_examples = settings(max_examples=25, deadline=None)
_shapes = st.tuples(st.integers(1, 5), st.integers(1, 90))


def _codec(name: str) -> ActivationCodec:
    return activation_codec(name, _BASIS, _FIXED)


def _hidden(shape: tuple[int, int], seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """What a constrained stage makes, and its tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, _NUM_IDS, shape, generator=generator)
    return _FIXED[ids] + scale * torch.randn(*shape, _RANK, generator=generator) @ _BASIS.matrix.T, ids


def _sent(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Over the wire: as bytes, and back."""
    data = b"".join(map(bytes, chunks_of(tensors)))
    return tensors_in(torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy(), specs_of(tensors))


def _tolerance(name: str, magnitude: float) -> float:
    """Largest error of a value, by what each packing promises; a subspace adds up `_RANK` of them."""
    packing = name.partition("+")[2] or name.replace("subspace", "fp32")
    each = {"fp32": 0.0, "fp16": 2.0**-11, "int8": 0.51 / 127}[packing]
    return (each * (_RANK if "subspace" in name else 1) + 2e-6) * magnitude


@_all_codecs
@_examples
@given(shape=_shapes, seed=st.integers(0, 2**20), scale=st.floats(1e-3, 1e4))
def test_an_activation_arrives_within_what_its_codec_promises(name, shape, seed, scale):
    codec = _codec(name)
    hidden, ids = _hidden(shape, seed, scale)
    own_ids = ids if codec.needs_ids else None
    encoded = codec.encode(hidden, own_ids)
    decoded = codec.decode(_sent(encoded.tensors), None if own_ids is None else own_ids.int())
    assert decoded.shape == hidden.shape and decoded.dtype == torch.float32
    assert float((decoded - hidden).abs().max()) <= _tolerance(name, float(hidden.abs().max()) + scale * 6)
    assert encoded.raw_bytes == 4 * hidden.numel()
    assert encoded.wire_bytes == codec.wire_bytes(*shape, _DIM, "activation")


@_all_codecs
@_examples
@given(shape=_shapes, seed=st.integers(0, 2**20), exponent=st.integers(-30, 6))
def test_a_gradient_arrives_with_what_the_subspace_keeps_of_it(name, shape, seed, exponent):
    codec = _codec(name)
    gradient = 10.0**exponent * torch.randn(*shape, _DIM, generator=torch.Generator().manual_seed(seed))
    kept = gradient @ _BASIS.matrix @ _BASIS.matrix.T if codec.needs_ids else gradient
    decoded = codec.grad_decode(_sent(codec.grad_encode(gradient).tensors))
    assert float((decoded - kept).abs().max()) <= _tolerance(name, 6 * float(gradient.abs().max()))


@_all_codecs
@_examples
@given(shape=_shapes, direction=st.sampled_from(["activation", "gradient"]))
def test_exactly_the_announced_tensors_travel(name: str, shape: tuple[int, int], direction: Direction):
    codec = _codec(name)
    hidden, ids = _hidden(shape, 0)
    encoded = codec.encode(hidden, ids) if direction == "activation" else codec.grad_encode(hidden)
    specs = codec.specs(*shape, _DIM, direction)
    assert specs_of(encoded.tensors) == tuple(sorted(specs, key=lambda spec: spec.name))
    assert encoded.wire_bytes == sum(spec.size_bytes for spec in specs)
    codec.check(encoded.tensors, *shape, _DIM, direction)


def test_activation_gradient_and_ids_have_names_of_their_own():
    specs = [spec for direction in ("activation", "gradient") for spec in _codec("int8").specs(1, 2, _DIM, direction)]
    names = sorted(spec.name for spec in (*specs, ids_spec(1, 2)))
    assert names == ["activation", "activation.scales", "gradient", "gradient.scales", "ids"]


@pytest.mark.parametrize(
    ("name", "ratio"), [("fp32", 1), ("fp16", 2), ("int8", 4), ("subspace", 6), ("subspace+fp16", 12)]
)
def test_bytes_saved(name: str, ratio: float):
    encoded = _codec(name).encode(*_hidden((8, 128), 0))
    assert encoded.raw_bytes / encoded.wire_bytes == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("basis", [_BASIS, _ROTATED], ids=["coordinates", "rotated"])
def test_what_is_in_the_subspace_travels_and_what_is_not_is_lost(basis: Basis):
    _, ids = _hidden((2, 8), 0)
    codec = activation_codec("subspace", basis, _FIXED)
    generator = torch.Generator().manual_seed(1)
    hidden = _FIXED[ids] + torch.randn(2, 8, _RANK, generator=generator) @ basis.matrix.T
    outside = torch.randn(2, 8, _DIM, generator=generator)
    kept = outside @ basis.matrix @ basis.matrix.T
    torch.testing.assert_close(codec.grad_decode(codec.grad_encode(outside).tensors), kept, rtol=0, atol=1e-5)
    decoded = codec.decode(codec.encode(hidden + outside - kept, ids).tensors, ids)
    torch.testing.assert_close(decoded, hidden, rtol=0, atol=1e-5)


@_all_codecs
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_neither_sent_nor_taken(name: str, value: float):
    codec = _codec(name)
    hidden, ids = _hidden((2, 8), 0)
    activation, gradient = codec.encode(hidden, ids).tensors, codec.grad_encode(hidden).tensors
    hidden[1, 7, 3] = value
    with pytest.raises(NonFiniteActivationError, match="activation: expected finite"):
        codec.encode(hidden, ids)
    with pytest.raises(NonFiniteActivationError, match="gradient: expected finite"):
        codec.grad_encode(hidden)
    if not name.endswith("int8"):  # Its levels are whole numbers.
        activation["activation"][0, 0, 0] = gradient["gradient"][0, 0, 0] = value
        with pytest.raises(NonFiniteActivationError):
            codec.decode(activation, ids)
        with pytest.raises(NonFiniteActivationError):
            codec.grad_decode(gradient)


@pytest.mark.parametrize("name", ["fp16", "int8", "subspace+fp16", "subspace+int8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, None])
def test_a_scale_that_nobody_made_or_that_is_missing_is_refused(name: str, value: float | None):
    hidden, ids = _hidden((2, 8), 0)
    tensors = _codec(name).encode(hidden, ids).tensors
    if value is None:
        del tensors["activation.scales"]
    else:
        tensors["activation.scales"][0] = value
    with pytest.raises(CodecError, match="scales"):
        _codec(name).decode(tensors, ids)


@_all_codecs
@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensors: {},
        lambda tensors: tensors | {"more": torch.zeros(1)},
        lambda tensors: tensors | {"activation": tensors["activation"].double()},
        lambda tensors: tensors | {"activation": tensors["activation"][:, :-1]},
        lambda tensors: tensors | {"activation": tensors["activation"].flatten()},
        lambda tensors: tensors | {"activation": tensors["activation"][..., :-1]},
        lambda tensors: {"gradient": tensors["activation"]},
    ],
)
def test_other_tensors_than_announced_are_refused(name: str, spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]]):
    tensors = spoil(_codec(name).encode(*_hidden((2, 300), 0)).tensors)
    with pytest.raises(CodecError, match="expected"):
        _codec(name).check(tensors, 2, 300, _DIM, "activation")


def test_decoding_refuses_what_does_not_go_together():
    codec = _codec("subspace")
    hidden, ids = _hidden((2, 8), 0)
    tensors = codec.encode(hidden, ids).tensors
    for wrong in (None, ids[:, :-1], ids + _NUM_IDS, ids - _NUM_IDS, ids.float(), ids.flatten()):
        with pytest.raises(CodecError, match="ids"):
            codec.decode(tensors, wrong)
        with pytest.raises(CodecError, match="ids"):
            codec.encode(hidden, wrong)
    for other in ({"activation": torch.zeros(2, 8, 5)}, {}):
        with pytest.raises(CodecError, match="expected"):
            codec.decode(other, ids)


def test_half_precision_activations_are_encoded_in_fp32_also_under_autocast():
    codec = activation_codec("subspace", _ROTATED, _FIXED)
    _, ids = _hidden((2, 8), 0)
    hidden = _FIXED[ids] + torch.ones(2, 8, _RANK) @ _ROTATED.matrix.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoded = codec.decode(codec.encode(hidden, ids).tensors, ids)
        half = codec.encode(hidden.bfloat16(), ids).tensors["activation"]
    torch.testing.assert_close(decoded, hidden, rtol=0, atol=1e-5)
    assert half.dtype == torch.float32


def test_zeros_and_extremes_of_fp32_survive_fp16():
    gradient = torch.zeros(4, 2, 3)
    gradient[1], gradient[2] = 3e-38, 3e38
    gradient[3, 0, 0], gradient[3, 1, 2] = 1e-12, 1e-6
    decoded = _codec("fp16").grad_decode(_codec("fp16").grad_encode(gradient).tensors)
    torch.testing.assert_close(decoded, gradient, rtol=2**-10, atol=1e-45)


_WITHIN, _IDS = _hidden((2, 4), 1)
_STRAYED = _WITHIN + 0.1 * torch.randn(2, 4, _DIM, generator=torch.Generator().manual_seed(0))


def _send(meter: LinkMeter, codec_name: str, hidden: Tensor) -> float | None:
    return meter.activation(hidden, _IDS, _codec(codec_name).encode(hidden, _IDS))


def _meter(codec_name: str, **options: object) -> LinkMeter:
    return LinkMeter("head → tail", _codec(codec_name), 0.01, **options)  # type: ignore[arg-type]


@_all_codecs
def test_a_constrained_model_raises_no_alarm(name: str):
    meter = _meter(name, every=1)
    for _ in range(5):
        _send(meter, name, _WITHIN)
    figures = meter.figures()
    assert figures.alarms == 0 and figures.error < 0.02
    assert (figures.error < 1e-6) == (name in ("fp32", "subspace"))


@pytest.mark.parametrize("codec_name", ["subspace", "subspace+int8"])
def test_a_model_that_has_strayed_is_counted_and_said_once_a_minute(codec_name: str, caplog: pytest.LogCaptureFixture):
    now_s = 1000.0
    meter = _meter(codec_name, every=1, clock=lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for num_said in (1, 1, 1, 1, 2):
            now_s += 15.0
            _send(meter, codec_name, _STRAYED)
            assert len(caplog.records) == num_said
    assert "head → tail" in caplog.records[1].message and "5 times" in caplog.records[1].message
    assert meter.figures().alarms == 5
    assert meter.figures().max_error >= meter.figures().error > 0.05


def test_only_every_so_many_activations_are_measured_and_the_average_follows_slowly():
    meter = _meter("subspace", every=3)
    measured = [_send(meter, "subspace", _WITHIN if number < 6 else _STRAYED) is not None for number in range(7)]
    assert measured == [True, False, False, True, False, False, True]
    figures = meter.figures()
    assert 0.05 * figures.max_error < figures.error < 0.2 * figures.max_error
