"""The loss on held-out shards: which tokens, in which units, and against torch's own cross entropy."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from genesis.tokenizer import tokenizer_of
from loader import LoaderError, LoaderUsageError
from loader.options import StoreOptions
from loader.session import Session
from manifests import EOS_ID
from tests.support.small_store import copy_small_store, segment_of, text_store
from trainer.errors import TrainerUsageError
from trainer.evaluation import EvalConfig, HeldOut, sample_text
from trainer.evaluation.evaluator import Evaluator
from trainer.model import ModelConfig, Transformer, build_model, limit_ids

CPU = torch.device("cpu")
SEQ_LEN = 32


@pytest.fixture
def two_sources(tmp_path: Path) -> Session:
    copy_small_store(tmp_path / "store")
    return opened(tmp_path / "store", tmp_path)


def opened(store: Path, folder: Path) -> Session:
    return Session.open(StoreOptions.of(store, cache_dir=folder / "cache", timeout_s=5.0))


def held_out(session: Session, **options: object) -> HeldOut:
    return HeldOut.of(session, **({"holdout": 2, "seq_len": SEQ_LEN, "num_tokens": 4096} | options))  # type: ignore[arg-type]


def model_for(session: Session, *, seed: int = 1) -> Transformer:
    shape = ModelConfig(
        vocab_size=1024, dim=16, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=32, max_seq_len=SEQ_LEN
    )
    model = build_model(shape, seed)
    limit_ids(model, session.catalog.vocabulary().next_merge_id)
    return model


def test_only_the_first_shards_of_each_source_are_read_and_evenly(two_sources: Session, tmp_path: Path) -> None:
    found = held_out(two_sources)
    entries = segment_of(tmp_path / "store").shards
    assert set(found.windows) == {"alpha", "beta"}
    for name, (inputs, labels) in found.windows.items():
        first = [entry.id for entry in entries if entry.source == name][:2]
        per_shard = [two_sources.open_shard(shard).ids for shard in first]
        assert inputs.shape == labels.shape == (64, SEQ_LEN)
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        places = []
        for row in inputs.numpy():
            hits = [
                (shard, start)
                for shard, ids in enumerate(per_shard)
                for start in range(0, len(ids) - SEQ_LEN, SEQ_LEN)
                if np.array_equal(ids[start : start + SEQ_LEN], row)
            ]
            places.append(hits[0])
        assert places == sorted(set(places)), "no window twice"
        assert [shard for shard, _ in places].count(0) == 32
    again = held_out(two_sources)
    assert all(torch.equal(again.windows[name][0], found.windows[name][0]) for name in found.windows)


def test_bytes_are_those_of_the_text_that_the_labels_spell(two_sources: Session) -> None:
    found, tokenizer = held_out(two_sources), tokenizer_of(two_sources.catalog.vocabulary())
    for _, labels in found.windows.values():
        spelt = tokenizer.decode_bytes(labels.numpy().ravel())
        assert int(found.bytes_of[labels].sum()) == len(spelt)


def test_the_loss_is_torchs_cross_entropy_and_measuring_leaves_no_trace(two_sources: Session) -> None:
    model, found = model_for(two_sources), held_out(two_sources)
    model.train()
    random.seed(1)
    before = (random.getstate(), torch.get_rng_state(), {name: it.clone() for name, it in model.state_dict().items()})
    measured = found.measure(model, CPU, rows=7)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(torch.equal(value, before[2][name]) for name, value in model.state_dict().items())
    nats = num_tokens = num_bytes = 0.0
    for name, (inputs, labels) in found.windows.items():
        with torch.no_grad():
            scores = model(inputs)[..., : model.readout.num_ids]
        own = float(functional.cross_entropy(scores.flatten(0, 1).double(), labels.flatten(), reduction="sum"))
        part = measured.by_source[name]
        assert part.nats == pytest.approx(own, rel=1e-5)
        nats, num_tokens, num_bytes = nats + own, num_tokens + part.num_tokens, num_bytes + part.num_bytes
    assert measured.whole.nats_per_token == pytest.approx(nats / num_tokens, rel=1e-5)
    assert measured.whole.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert num_tokens == 4096


def test_ids_the_model_does_not_know_are_not_measured(two_sources: Session) -> None:
    model, found = model_for(two_sources), held_out(two_sources)
    limit_ids(model, 300)
    whole = found.measure(model, CPU, rows=8).whole
    labels = torch.cat([labels.flatten() for _, labels in found.windows.values()])
    assert whole.num_tokens == int((labels < 300).sum()) < labels.numel()
    assert whole.num_bytes == int(found.bytes_of[labels[labels < 300]].sum())
    assert 0 < whole.nats_per_token < 2 * math.log(300)


def test_what_cannot_be_measured_is_told(two_sources: Session, tmp_path: Path) -> None:
    with pytest.raises(TrainerUsageError, match="holdout"):
        held_out(two_sources, holdout=0)
    with pytest.raises(TrainerUsageError, match="expected at most 1999 tokens"):
        held_out(two_sources, seq_len=2000)
    with pytest.raises(LoaderUsageError, match="gamma"):
        held_out(two_sources, sources=("gamma",))
    assert set(held_out(two_sources, sources=("beta",)).windows) == {"beta"}
    whole = held_out(two_sources, num_tokens=0)
    assert [len(inputs) for inputs, _ in whole.windows.values()] == [2 * (1999 // SEQ_LEN)] * 2


def test_a_store_that_cannot_be_read_costs_a_measurement_and_not_the_run(
    two_sources: Session, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = []

    def read() -> HeldOut:
        attempts.append(1)
        if len(attempts) < 2:
            raise LoaderError("the mirror is down")
        return held_out(two_sources)

    evaluator = Evaluator(
        config=EvalConfig(every_steps=5, sample_every_steps=3, sample_tokens=4),
        read=read,
        vocabulary=two_sources.catalog.vocabulary,
        device=CPU,
        rows=8,
        round_steps=10,
        autocast=nullcontext,
        seed=1,
    )
    model = model_for(two_sources)
    assert evaluator.after_step(model, 5, after_round=False) is None
    assert "the mirror is down" in caplog.text
    due = {step: evaluator.after_step(model, step, after_round=step == 7) for step in range(1, 11)}
    assert [step for step, found in due.items() if found and found.held_out] == [5, 7, 10]
    assert [step for step, found in due.items() if found and found.samples] == [3, 6, 9]
    assert len(attempts) == 2


def test_samples_are_what_the_model_finds_probable_and_the_same_for_a_seed(tmp_path: Path) -> None:
    session = opened(text_store(), tmp_path)
    model, tokenizer = model_for(session), tokenizer_of(session.catalog.vocabulary())
    prompts = ("", "The library")
    state = torch.get_rng_state()

    def drawn(seed: str, temperature: float = 1.0) -> list[str]:
        found = sample_text(
            model, tokenizer, prompts, CPU, eos_id=EOS_ID, num_tokens=12, temperature=temperature, seed=seed
        )
        assert [sample.prompt for sample in found] == list(prompts)
        return [sample.text for sample in found]

    assert drawn("a") == drawn("a") != drawn("b")
    assert torch.equal(torch.get_rng_state(), state)
    ids = [EOS_ID, *tokenizer.encode(prompts[1]).tolist()]
    length = len(ids)
    with torch.no_grad():
        while len(ids) < length + 12:
            ids.append(int(model(torch.tensor([ids]))[0, -1, : model.readout.num_ids].argmax()))
    own = ids[length:]
    own = own[: own.index(EOS_ID)] if EOS_ID in own else own
    assert drawn("a", 0.0)[1] == tokenizer.decode(own)
    long = sample_text(
        model, tokenizer, ["word " * 500], CPU, eos_id=EOS_ID, num_tokens=2000, temperature=1.0, seed="x"
    )
    assert len(long) == 1


def test_an_end_of_document_ends_the_text(tmp_path: Path) -> None:
    session = opened(text_store(), tmp_path)
    model, tokenizer = model_for(session), tokenizer_of(session.catalog.vocabulary())
    with torch.no_grad():
        model.readout.norm.weight.zero_()
        model.readout.output.weight.zero_()
    found = sample_text(model, tokenizer, [""], CPU, eos_id=EOS_ID, num_tokens=5, temperature=0.0, seed="x")
    assert found[0].text == tokenizer.decode([0] * 5), "all alike, so the first id each time"
    model.readout.num_ids = EOS_ID + 1
    found = sample_text(model, tokenizer, [""], CPU, eos_id=EOS_ID, num_tokens=20, temperature=1.0, seed="y")
    assert found[0].text == "", "only special tokens, which spell nothing"


@pytest.mark.parametrize(
    "options",
    [{"every_steps": -1}, {"tokens": 0}, {"sample_prompts": ()}, {"sample_tokens": 5000}, {"temperature": math.nan}],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(TrainerUsageError, match=rf"eval\.{next(iter(options))}:"):
        EvalConfig(**options)  # type: ignore[arg-type]
