"""A run file says one thing in YAML and in JSON, and only as its owner signed it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.signed_runs import OWNER, SMALL, run_file
from trainer.errors import RunFileError
from trainer.network.rpc.identity import Identity
from trainer.run.config import RunConfig, from_mapping, merged, nested, to_mapping
from trainer.run.signed import RunFile
from trainer.run.signed.fields import STANDINGS
from trainer.run.signed.files import check_config, make_key, read_key, read_run_file


@given(
    lr=st.floats(1e-12, 1e3),
    seed=st.integers(0, 2**31),
    weights=st.dictionaries(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5), st.floats(0.1, 9)),
    clip=st.floats(1e-6, 1e6) | st.just(math.inf),
)
def test_yaml_and_json_say_the_same_and_hold_the_signature(
    lr: float, seed: int, weights: dict[str, float], clip: float
) -> None:
    file = run_file(inner={"lr": lr}, seed=seed, data={"sources": weights}, swarm={"stage": {"clip_factor": clip}})
    for body in (file.to_yaml().encode(), file.to_json()):
        found = read_run_file(body, "run")
        found.verify("run")
        assert found == file
    config = check_config(file, "run")
    assert (config.inner.lr, config.seed, config.data.sources, config.swarm.stage.clip_factor) == (
        *(lr, seed, weights, clip),
    )
    assert RunFile.of(config, OWNER.peer_id).digest() == file.digest()


def test_a_run_file_has_what_nodes_share_and_nothing_of_their_own() -> None:
    file = run_file()
    for name, standing in STANDINGS.items():
        assert file.says(name) == (standing != "own"), name
    config = check_config(file, "run")
    assert (config.run_id, config.node_id, config.model.preset) == ("corpus-8", "", "tiny")


def _tampered(change: dict[str, Any]) -> bytes:
    return yaml.safe_dump(merged(json.loads(run_file().to_json()), change)).encode()


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"inner": {"lr": 1.0}}},
        {"config": {"seed": 1}},
        {"name": "other"},
        {"authorities": ["ab" * 32]},
        {"owner": Identity.create().peer_id},
    ],
)
def test_whatever_is_changed_the_signature_does_not_hold(change: dict[str, Any]) -> None:
    with pytest.raises(RunFileError, match="expected it as its owner") as refused:
        read_run_file(_tampered(change), "run.yaml").verify("run.yaml")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "found no owner and config"),
        (b"inner: {lr: 3e-4}", "found no owner and config"),
        (b"owner: 7\nconfig: {}", "name: Field required"),
        (_tampered({"version": 2}), "version"),
        (_tampered({"extra": 2}), "extra"),
        (_tampered({"signature": "00"}), "signature"),
        (b"owner: x\nconfig: {a: .nan}", "not a run file"),
        (b"owner: x\nconfig: {a: 2026-01-01}", "not a run file"),
        (b"\xff\xfe", "expected UTF-8"),
        (b"x" * 300_000, "at most 262144 bytes"),
    ],
)
def test_files_that_are_no_run_files(body: bytes, said: str) -> None:
    with pytest.raises(Exception, match=said) as refused:
        read_run_file(body, "run.yaml")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("run.yaml: ")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_are_more_than_a_refusal(body: bytes) -> None:
    from trainer.errors import TrainerUsageError

    with pytest.raises(TrainerUsageError):
        read_run_file(body, "run.yaml")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("node_id", "n", "node_id: expected what all nodes share"),
        ("checkpoint.directory", "/x", "checkpoint.directory: expected what all nodes share"),
        ("inner.learning_rate", 1.0, "inner.learning_rate: there is no such option"),
        ("inner.lr", -1.0, "inner.lr: expected a learning rate above 0"),
    ],
)
def test_options_that_have_no_place_in_a_run_file(name: str, value: Any, said: str) -> None:
    file = run_file()
    wrong = file.model_copy(update={"config": merged(file.config, nested(name, value))}).signed(OWNER)
    with pytest.raises(RunFileError, match=said):
        check_config(wrong, "run.yaml")


def test_a_draft_is_no_run_and_only_its_owner_signs_it() -> None:
    draft = RunFile.of(from_mapping(RunConfig, SMALL), OWNER.peer_id)
    with pytest.raises(RunFileError, match="found a draft"):
        draft.verify("run.yaml")
    with pytest.raises(RunFileError, match="expected the key of its owner"):
        draft.signed(Identity.create())
    draft.signed(OWNER).verify("run.yaml")


def test_the_bytes_that_are_signed() -> None:
    file = RunFile(name="r", owner="ab" * 32, config={"inner": {"lr": 1e-5, "betas": [0.9, 0.95]}, "seed": 3})
    assert file.signed_bytes() == (
        b'genesis run 1\n{"authorities":[],"config":{"inner":{"betas":[0.9,0.95],"lr":1e-05},"seed":3},"name":"r",'
        b'"owner":"' + b"ab" * 32 + b'","version":1}'
    )
    assert file.digest() == "2bfbdd84c13fd53fa66d70a14074cee98bd601fbd877e9e66b62c7c4d02dc7e8"


def test_a_key_is_made_once_and_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    owner = make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).peer_id == owner.peer_id
    with pytest.raises(RunFileError, match="expected no file"):
        make_key(path)
    assert read_key(path).peer_id == owner.peer_id
    path.write_text("nothing")
    with pytest.raises(RunFileError, match="expected an Ed25519 private key"):
        read_key(path)
    with pytest.raises(RunFileError, match="cannot be read"):
        read_key(tmp_path / "none")


def test_options_at_their_defaults_are_written_out() -> None:
    assert run_file().config["rule"] == to_mapping(RunConfig().rule)


@pytest.mark.parametrize(("layout", "whole_nodes"), [("mixed", False), ("stages", True), (None, True)])
def test_a_layout_that_the_options_contradict_is_refused(layout: Any, whole_nodes: bool) -> None:
    options = {"inner": {"micro_batch_size": 2}, "swarm": {"whole_nodes": whole_nodes}}
    file = run_file(**options).model_copy(update={"layout": layout})
    with pytest.raises(RunFileError, match="expected the layout mixed in a file with"):
        check_config(file, "run")
    right = file.model_copy(update={"layout": "mixed" if whole_nodes else "stages"})
    assert check_config(right, "run").swarm.whole_nodes == whole_nodes
