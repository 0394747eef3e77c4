"""Decoders of tensors, sums, states and files from others take them or raise the errors they document."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from manifests import Checkpoints, ContractError, Manifest, Segment, VocabularyFile, pack_ids, sha256_hex, unpack_ids
from tests.support.example_store import example_files
from tests.support.extremes import EXAMPLES, SHAPES, changed, damaged, outcome
from trainer.aggregation import Moments, moments
from trainer.checkpoint.stages.dcp import METADATA_NAME, DcpFolder
from trainer.compression.activations import ACTIVATION_CODECS, activation_codec
from trainer.compression.vectors import codec_named
from trainer.errors import (
    CodecError,
    CorruptCheckpointError,
    IncompatiblePeerError,
    NonFiniteActivationError,
    StateTransferError,
)
from trainer.model.subspace import basis_of
from trainer.network.transfer.descriptor import (
    Descriptor,
    Expectation,
    TensorSpec,
    all_finite,
    parse_descriptor,
    specs_of,
    tensors_in,
)
from trainer.outer.sparta.state import check_meta as check_sparta_meta
from trainer.run.node.state_form import check_meta

_DTYPES = ["float32", "float16", "bfloat16", "bool", "int8", "int64", "float64"]


@EXAMPLES
@given(st.sampled_from(_DTYPES), st.lists(SHAPES, max_size=3))
def test_shapes_of_tensors(dtype: Any, shapes: list[list[int]]) -> None:
    """What passes the message's own checks, and a receiver's bound of bytes, becomes tensors."""
    named = enumerate(map(tuple, shapes))
    found = [
        outcome(ValidationError, lambda n, s: TensorSpec(name=f"t{n}", dtype=dtype, shape=s), *each) for each in named
    ]
    specs = [spec for spec in found if spec is not None and spec.size_bytes < 1 << 24]
    tensors = tensors_in(np.zeros(sum(spec.size_bytes for spec in specs), np.uint8), specs)
    assert specs_of(tensors) == tuple(specs)
    assert all(map(all_finite, tensors.values()))


@pytest.mark.parametrize("shape", [(0, 2**47, 2**47), (2**47, 0, 2), (2**24, 2**24), (0, 0, 2**20, 2**20, 2**20)])
def test_a_tensor_of_no_possible_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="product"):
        TensorSpec(name="activation", dtype="float32", shape=shape)


def _odd(true: Tensor) -> st.SearchStrategy[Tensor]:
    made = [true, true[:0], true.reshape(-1), torch.cat([true, true], dim=-1), -true]
    made += [true.to(dtype) for dtype in (torch.bool, torch.int64, torch.float16, torch.float64, torch.bfloat16)]
    if true.is_floating_point():
        made += [true * float("nan"), true * float("inf"), torch.full_like(true, torch.finfo(true.dtype).max)]
    return st.sampled_from(made)


@pytest.mark.parametrize("name", ACTIVATION_CODECS)
@EXAMPLES
@given(data=st.data())
def test_activations_and_gradients(name: str, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, fixed = torch.randn(2, 8, 16, generator=generator), torch.randn(32, 16, generator=generator)
    ids = torch.arange(16).reshape(2, 8)
    codec = activation_codec(name, basis_of(16, 4, seed=1), fixed)
    sent, decode = codec.encode(hidden, ids).tensors, lambda tensors: codec.decode(tensors, ids)
    if data.draw(st.booleans()):
        sent, decode = codec.grad_encode(hidden).tensors, codec.grad_decode
    tensors = {key: data.draw(_odd(tensor)) for key, tensor in sent.items()}
    if data.draw(st.booleans()):
        tensors[data.draw(st.sampled_from(["activation", "gradient.scales", "x"]))] = torch.zeros(0, 4)
    found = outcome((CodecError, NonFiniteActivationError), decode, tensors)
    assert found is None or all_finite(found)
    outcome(CodecError, codec.check, tensors, 2, 8, 16, "activation")


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8"])
@EXAMPLES
@given(st.data(), st.integers(0, 3000))
def test_contributions(name: Any, data: st.DataObject, num_values: int) -> None:
    codec = codec_named(name)
    payload = data.draw(damaged(bytes(codec.encode(torch.linspace(-1, 1, num_values)))))
    outcome(CodecError, codec.decode, payload, data.draw(st.just(num_values) | st.integers(0, 5000)))


@EXAMPLES
@given(data=st.data())
def test_sums(data: st.DataObject) -> None:
    true = moments([torch.ones(4), torch.zeros(4)], torch.ones(4)).to_bytes()
    found = outcome(CodecError, Moments.from_bytes, data.draw(damaged(true)), 2)
    assert found is None or np.isfinite(found.gram).all()


_META = {"version": 1, "layout_digest": "0" * 64, "num_inner_steps": 9, "vocab_rows": 512}
_SPARTA = _META | {"kind": "sparta", "round_index": 3}
_META |= {"outer_step": 3, "fragment": 0}


@pytest.mark.slow
@EXAMPLES
@given(data=st.data())
def test_states(data: st.DataObject) -> None:
    true = Descriptor(meta=_META, tensors=(TensorSpec(name="a", dtype="int8", shape=(3, 0)),), pages=())
    document = data.draw(changed(json.loads(true.to_bytes())))
    wire = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    found = outcome(StateTransferError, parse_descriptor, wire, sha256_hex(wire))
    if found is not None:
        assert found.num_chunks >= 0
        outcome(StateTransferError, Expectation(max_bytes=1 << 20).check, found)
    outcome(IncompatiblePeerError, check_meta, data.draw(changed(_META)))
    outcome(IncompatiblePeerError, check_sparta_meta, data.draw(changed(_SPARTA)))


FILES = example_files()
MODELS = {"manifest": Manifest, "checkpoints": Checkpoints, "tokenizer.json": VocabularyFile, "index/": Segment}
DOCUMENTS = {
    key: (model, json.loads(FILES[key])) for key in FILES for prefix, model in MODELS.items() if key.startswith(prefix)
}


@pytest.mark.slow
@pytest.mark.parametrize("key", DOCUMENTS)
@EXAMPLES
@given(data=st.data())
def test_documents_of_stores(key: str, data: st.DataObject) -> None:
    model, document = DOCUMENTS[key]
    outcome(ContractError, model.from_json, json.dumps(data.draw(changed(document))).encode())
    outcome(ContractError, model.from_json, data.draw(damaged(FILES[key])))


@pytest.mark.parametrize("literal", ["1e999", "NaN", "Infinity", "9" * 5000, "[" * 9000, '"\\ud800"', "1.5", "-1"])
@pytest.mark.parametrize("key", DOCUMENTS)
def test_odd_numbers_in_documents_of_stores(key: str, literal: str) -> None:
    model, document = DOCUMENTS[key]
    for name in document:
        text = json.dumps({**document, name: "?"}).replace('"?"', literal)
        outcome(ContractError, model.from_json, text.encode())


@pytest.mark.slow
@EXAMPLES
@given(data=st.data())
def test_packed_shards(data: st.DataObject) -> None:
    packed = bytes(pack_ids(np.arange(200) % 100, 1000))
    ids = np.full(data.draw(st.just(200) | st.integers(0, 400)), -1)
    # The beginning of a frame says how large content and window are.
    wire = data.draw(damaged(packed) | damaged(packed[:12]).map(lambda header: header + packed[12:]))
    outcome(ContractError, unpack_ids, wire, ids, 1000)
    assert ((ids == -1).all()) or ids.max() < 1000


def _described(shape: Any, dtype: Any = torch.float32, file: Any = "__0_0.distcp", offset: Any = 0) -> Metadata:
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([1]), [])
    entry.size, entry.properties.dtype = shape, dtype
    chunk = Chunk(torch.Size([0]), torch.Size([1]))
    entry.chunks = [chunk]
    return Metadata({"a": entry}, storage_data={MetadataIndex("a", torch.Size([0])): _StorageInfo(file, offset, 10)})


@pytest.mark.parametrize(
    "described",
    [
        *map(_described, (torch.Size([0, 2**47, 2**47]), torch.Size([2**62]), (2**70,), (-1,), (1.5,), (True,))),
        *map(_described, ("shape", None, (1,) * 40)),
        _described((1,), dtype="float32"),
        *(_described((1,), file=file) for file in ("../../etc/passwd", "/dev/zero", 7)),
        *(_described((1,), offset=offset) for offset in (-1, 2.0)),
        Metadata({7: TensorStorageMetadata(TensorProperties(), torch.Size([1]), [])}, storage_data={}),
        Metadata([], storage_data={}),
    ],
)
def test_descriptions_of_checkpoints(tmp_path: Path, described: Metadata) -> None:
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(described))
    with pytest.raises(CorruptCheckpointError):
        DcpFolder(tmp_path)


@pytest.mark.parametrize("shape", [(4,), (2**40,)])
def test_a_checkpoint_without_what_it_describes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    (tmp_path / METADATA_NAME).write_bytes(pickle.dumps(_described(torch.Size(shape))))
    folder = DcpFolder(tmp_path)
    assert folder.shapes == {"a": shape}
    with pytest.raises(CorruptCheckpointError):
        folder.read(["a"])
