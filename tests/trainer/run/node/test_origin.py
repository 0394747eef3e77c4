"""Runs that begin with a model: at its very loss, with its vocabulary, and only among nodes that began with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from manifests import FrozenVocabularyFile, VocabularyFile, read_vocabulary_file, sha256_hex
from manifests.frozen_vocabulary import SpecialToken
from tests.support.foreign_tokenizers import foreign_json
from tests.support.model_configs import random_model, small_config
from tests.support.small_store import text_store
from tests.support.trainer_command import TrainerCommand, TrainerHere
from tests.support.training_swarm import TrainingSwarm
from trainer.checkpoint.node import checkpoint_path, wallet_id
from trainer.checkpoint.pretrained import Pretrained
from trainer.collective.messages import INIT_DIGEST
from trainer.errors import CheckpointMismatchError, RefusedError, TrainerUsageError
from trainer.model import ModelConfig, build_model, export_hf, limit_ids, preset
from trainer.network.rpc import Endpoint
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.data import open_dataset
from trainer.run.node.identity import identity_of, register_terms, terms_of
from trainer.run.node.loop_thread import LoopThread
from trainer.run.node.origin import check_vocabulary, origin_of
from trainer.run.node.replica import parameters_of
from trainer.run.swarm.shape import shape_of

_SHAPE = small_config(vocab_size=1024, dim=32, num_layers=2, max_seq_len=64, qk_norm=True, qk_norm_per_head=True)
_WAIT_S = 280.0
"""For processes that take some seconds on an idle machine."""
_COMMON = ("--seq-len", "32", "--batch-size", "2", "--threads", "1", "--no-api", "--plateau", "off")


def _write(folder: Path, seed: int, shape: ModelConfig = _SHAPE) -> Path:
    export_hf(random_model(shape, seed), shape, text_store() / "tokenizer.json", folder)
    return folder


def _losses(said: str) -> list[float]:
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def _first_batch(folder: Path, seq_len: int) -> dict[str, Any]:
    data = {"store": str(text_store()), "cache_dir": str(folder / "cache"), "plateau": "off"}
    inner = {"seq_len": seq_len, "micro_batch_size": 2}
    dataset = open_dataset(from_mapping(RunConfig, {"node_id": "a", "data": data, "inner": inner}))
    try:
        return dict(next(iter(dataset)))
    finally:
        dataset.close()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--set", "model.tie_embeddings=true", "--set", "model.qkv_bias=true")])
def test_a_run_goes_on_at_the_very_loss_of_its_own_export(
    options: tuple[str, ...], here: TrainerHere, trainer: TrainerCommand, tmp_path: Path
) -> None:
    here("--node-id", "a", "--plateau", "off", "--max-steps", "30", *options)
    saved = trainer.saved("a")
    here.other("export", "--checkpoint-dir", trainer.checkpoints, "--node-id", "a", tmp_path / "hf")
    vocabulary = read_vocabulary_file((text_store() / "tokenizer.json").read_bytes())
    model = build_model(ModelConfig.from_dict(saved["architecture"]), 0)
    model.load_state_dict(parameters_of(saved["layers"]))
    limit_ids(model, vocabulary.next_merge_id)
    batch = _first_batch(tmp_path, 32)
    with torch.no_grad():
        expected = float(model(batch["input_ids"], batch["labels"]))

    again = replace(trainer, common=_COMMON)
    line = again.line("--node-id", "a", "--checkpoint-dir", tmp_path / "second", "--max-steps", "2", "--json")[3:]
    said = here.other(*line, "--init-from", tmp_path / "hf")
    assert _losses(said)[0] == expected
    written = yaml.safe_load(checkpoint_path(tmp_path / "second", wallet_id("", "a")).with_suffix(".yaml").read_text())
    assert written["model"]["preset"] == ("auto" if options else "tiny")
    assert written["model"]["init_digest"] == Pretrained.open(tmp_path / "hf").digest()


@pytest.mark.slow
def test_the_same_command_goes_on_and_other_weights_or_shapes_are_refused(
    here: TrainerHere, trainer: TrainerCommand, tmp_path: Path
) -> None:
    begun = replace(trainer, common=_COMMON)
    one, two = _write(tmp_path / "one", 1), _write(tmp_path / "two", 2)

    def train(*options: str | Path, steps: int, expect: int = 0) -> str:
        return here.other(*begun.line("--node-id", "a", "--max-steps", str(steps), *options)[3:], expect=expect)

    assert "first weights: " in train("--init-from", one, steps=2)
    digest = begun.saved("a")["config"]["model"]["init_digest"]
    assert digest == Pretrained.open(one).digest()
    (one / "model.safetensors").rename(tmp_path / "elsewhere")  # It is not needed any more.
    assert "going on from step 2" in train("--init-from", one, steps=3)
    assert "going on from step 3" in train(steps=4)
    assert "going on from step 4" in train("--set", f"model.init_digest={digest}", steps=5)
    kept = checkpoint_path(begun.checkpoints, wallet_id("", "a")).with_suffix(".yaml")
    assert "going on from step 5" in here.other("--config", kept, "--max-steps", "6", "--no-api")
    assert begun.saved("a")["config"]["model"]["init_digest"] == digest
    assert "expected a checkpoint of a run that began with the weights" in train("--init-from", two, steps=7, expect=1)

    fresh = ("--checkpoint-dir", tmp_path / "fresh", "--init-from", two)
    for options, said in (
        (("--preset", "tiny"), "expected its shape or none, found model.dim 128 (there 32)"),
        (("--set", "model.ffn_dim=48"), "found model.ffn_dim 48 (there 24)"),
        (("--set", f"model.init_digest={digest}"), f"expected the weights {digest[:12]} (model.init_digest), found"),
    ):
        assert said in train(*fresh, *options, steps=1, expect=1)
    assert "--init-from: expected" in train(*fresh, "--set", "model.memory_bytes=1000", steps=1, expect=2)
    assert "or nodes of the run to take the state from" in train(
        "--checkpoint-dir", tmp_path / "fresh", "--set", f"model.init_digest={digest}", steps=1, expect=2
    )
    assert "inner.seq_len: expected at most the 64 tokens" in train(*fresh, "--seq-len", "65", steps=1, expect=2)

    train("--checkpoint-dir", tmp_path / "seeded", "--preset", "tiny", steps=1)
    assert "found one that began with weights by its seed" in train(
        "--checkpoint-dir", tmp_path / "seeded", "--init-from", two, steps=2, expect=1
    )


@pytest.fixture
def frozen() -> FrozenVocabularyFile:
    text = foreign_json("qwen")
    num_ids = 1 + max(each["id"] for each in json.loads(text)["added_tokens"])
    eos = SpecialToken(id=num_ids - 1, token="<|endoftext|>")
    return FrozenVocabularyFile(
        origin="tokenizer.json",
        next_merge_id=num_ids,
        eos=eos,
        tokenizer_json=text,
        tokenizer_sha256=sha256_hex(text.encode()),
    )


def _with_rows(folder: Path, rows: int) -> Pretrained:
    return replace(Pretrained.open(folder), config=replace(_SHAPE, vocab_size=rows))


def test_the_store_s_vocabulary_has_to_be_the_model_s(frozen: FrozenVocabularyFile, tmp_path: Path) -> None:
    folder = _write(tmp_path / "hf", 1)
    ours = VocabularyFile.from_json((text_store() / "tokenizer.json").read_bytes())
    check_vocabulary(Pretrained.open(folder), ours)
    check_vocabulary(_with_rows(folder, ours.next_merge_id + 1024), ours)
    for rows in (ours.next_merge_id - 1, ours.next_merge_id + 1025, 151_936):
        with pytest.raises(CheckpointMismatchError, match=f"the store's {ours.next_merge_id} ids .* found {rows} rows"):
            check_vocabulary(_with_rows(folder, rows), ours)

    theirs = _with_rows(folder, frozen.next_merge_id)
    with pytest.raises(CheckpointMismatchError, match="expected the store's vocabulary, found another: id 0 is"):
        check_vocabulary(theirs, frozen)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(frozen.tokenizer_json)))  # Another form of the same.
    check_vocabulary(theirs, frozen)
    for changed in (frozen.tokenizer_json[:-100], "{}", '{"model": {"vocab": 7}}', '{"model": {"vocab": [[]]}}'):
        (folder / "tokenizer.json").write_text(changed)
        with pytest.raises(CheckpointMismatchError, match="expected a tokenizer in Hugging Face's form"):
            check_vocabulary(theirs, frozen)
    (folder / "tokenizer.json").unlink()  # Then only sizes can be compared.
    check_vocabulary(theirs, frozen)


def test_a_store_s_own_vocabulary_may_have_grown_since_the_model_was_made(tmp_path: Path) -> None:
    """A node that starts later with the folder its run began with is no stranger."""
    ours = VocabularyFile.from_json((text_store() / "tokenizer.json").read_bytes())
    before = VocabularyFile.from_pairs(ours.pairs()[:-50], {})
    (tmp_path / "before.json").write_bytes(before.to_json())
    export_hf(random_model(_SHAPE, 1), _SHAPE, tmp_path / "before.json", tmp_path / "hf")
    for rows in (before.next_merge_id, ours.next_merge_id):
        check_vocabulary(_with_rows(tmp_path / "hf", rows), ours)
    fewer = _with_rows(tmp_path / "hf", before.next_merge_id - 1)
    with pytest.raises(CheckpointMismatchError, match=f"found {before.next_merge_id - 1} rows"):
        check_vocabulary(fewer, ours)
    other = VocabularyFile.from_pairs([(10 + n // 200, 10 + n % 200) for n in range(len(ours.pairs()))], {})
    with pytest.raises(CheckpointMismatchError, match="expected the store's vocabulary, found another"):
        check_vocabulary(_with_rows(tmp_path / "hf", before.next_merge_id), other)
    (tmp_path / "hf/tokenizer.json").unlink()
    with pytest.raises(CheckpointMismatchError, match=f"found {before.next_merge_id} rows"):
        check_vocabulary(_with_rows(tmp_path / "hf", before.next_merge_id), ours)


def test_what_a_run_began_with_is_part_of_its_terms() -> None:
    vocabulary = VocabularyFile.from_json((text_store() / "tokenizer.json").read_bytes())

    def terms(**model: Any) -> Any:
        return terms_of(from_mapping(RunConfig, {"node_id": "a", "model": model}), preset("tiny", 1024), vocabulary)

    seeded, one, two = terms(), terms(init_digest="1" * 64), terms(init_digest="2" * 64)
    assert INIT_DIGEST not in seeded.synchronisation, "as earlier releases say it"
    assert len({each.digest() for each in (seeded, one, two)}) == 3
    for ours, other, said in (
        (one, two, "this run began with the weights 111111111111, the node with 222222222222"),
        (one, seeded, "this run began with the weights 111111111111, the node with those of its seed"),
        (seeded, two, "this run began with the weights of its seed, the node with 222222222222"),
    ):
        with pytest.raises(RefusedError, match=said):
            ours.check(other, "x")
    one.check(terms(init_digest="1" * 64, init_from="/another/path"), "x")


def test_a_swarm_says_where_it_takes_first_weights_from() -> None:
    values = {"node_id": "a", "model": {"preset": "tiny", "init_from": "/x"}, "swarm": {"vocab_rows": 1024}}
    with pytest.raises(TrainerUsageError, match=r"workers begin with the folder of swarm\.start_from, found /x"):
        shape_of(from_mapping(RunConfig, values))
    own = {"dim": 64, "num_layers": 4, "num_heads": 2, "ffn_dim": 64, "qkv_bias": True}
    found = shape_of(from_mapping(RunConfig, values | {"model": own}))
    assert (found.model.dim, found.model.qkv_bias, found.plan.num_stages) == (64, True, 3)


def test_a_joiner_that_knows_nothing_is_told_by_the_peer_it_was_given(tmp_path: Path) -> None:
    """A real endpoint answers; a run that began by its seed leaves the choice to the joiner."""
    vocabulary = VocabularyFile.from_json((text_store() / "tokenizer.json").read_bytes())
    base = {"state_dir": str(tmp_path), "rpc": {"host": "127.0.0.1", "public_address": "127.0.0.1"}}
    for digest, shape in (("1" * 64, _SHAPE), ("", preset("15m", 1024))):
        told = from_mapping(RunConfig, base | {"node_id": "first", "model": {"init_digest": digest}})
        endpoint, loop = Endpoint(identity_of(told), told.run_id, told.rpc), LoopThread("test")
        loop.start()
        try:
            register_terms(endpoint, terms_of(told, shape, vocabulary))
            loop.run(endpoint.start(), 60.0)
            peers = {"initial_peers": [endpoint.address]}
            config = from_mapping(RunConfig, base | {"node_id": "joiner", "discovery": peers})
            origin = origin_of(config, None, vocabulary)
        finally:
            loop.run(endpoint.stop(), 60.0)
            loop.stop()
        assert (origin.choice.init_digest, origin.awaits_state) == (digest, bool(digest))
        assert origin.choice.shape(1024) == (shape if digest else None)
        assert origin.shape(1024) is None


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[TrainingSwarm]:
    settings = {"model": {"preset": "auto"}, "inner": {"warmup_steps": 5}, "data": {"holdout": 0}}
    with TrainingSwarm(tmp_path, **settings) as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_that_began_otherwise_refuse_each_other_and_a_joiner_needs_no_folder(
    swarm: TrainingSwarm, tmp_path: Path
) -> None:
    one, two = _write(tmp_path / "one", 1), _write(tmp_path / "two", 2)
    swarm.begin("first", options=("--init-from", str(one)))
    swarm.wait_for_step(1, timeout_s=_WAIT_S)
    swarm.begin("joiner")
    swarm.begin("other", options=("--init-from", str(two)))
    assert swarm.nodes.pop("other").exit_code(_WAIT_S) == 1
    assert "this run began with the weights" in (tmp_path / "other.out").read_text()

    swarm.wait_for_step(swarm["first"].outer_step + 3, timeout_s=_WAIT_S)
    assert "its shape and state are taken from the others" in swarm["joiner"].output()
    states = [swarm[name].states() for name in ("first", "joiner")]
    shared = set(states[0]) & set(states[1])
    assert shared and all(states[0][number] == states[1][number] for number in shared)
    assert swarm.stop() == [143, 143]
    saved = [swarm[name].checkpoint() for name in ("first", "joiner")]
    assert saved[0]["architecture"] == saved[1]["architecture"]
    assert saved[0]["config"]["model"]["init_digest"] == saved[1]["config"]["model"]["init_digest"]
    torch.testing.assert_close(saved[0]["diloco"]["vocab_rows"], saved[1]["diloco"]["vocab_rows"])
