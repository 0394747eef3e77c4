"""Options of a run that do not go together, or make no sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.errors import TrainerUsageError
from trainer.run.config import RunConfig, from_mapping, merged, parse_override


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "ddp"}, "strategy ddp: expected engine torch"),
        ({"engine": "torch", "discovery": {"initial_peers": ["10.0.0.1:4001"]}}, "engine torch: expected no initial"),
        ({"engine": "torch", "rpc": {"port": 4001}}, "engine torch: expected no initial_peers and no port"),
        ({"max_steps": -1}, "max_steps: expected 0 or more, found -1"),
        ({"threads": -1}, "threads: expected 0 or more, found -1"),
        ({"node_id": "../../etc"}, "node_id: expected"),
        ({"node_id": ".."}, "node_id: expected"),
        ({"node_id": "a" * 129}, "node_id: expected"),
        ({"run_id": ""}, "run_id: expected"),
        ({"run_id": "a/b"}, "run_id: expected"),
        ({"data": {"shards_per_node": 0}}, "data.shards_per_node: expected 1 or more, found 0"),
        ({"data": {"holdout": -1}}, "data.holdout: expected 0 or more, found -1"),
        ({"data": {"timeout_s": float("nan")}}, "data.timeout_s: expected a number of seconds above 0, found nan"),
        ({"data": {"refresh_s": 0}}, "data.refresh_s: expected a number of seconds above 0, found 0"),
        ({"checkpoint": {"every_steps": 0}}, "checkpoint.every_steps: expected 1 or more, found 0"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep: expected 1 or more, found 0"),
        ({"inner": {"lr": -1}}, "inner.lr: expected a learning rate above 0, found -1"),
        ({"diloco": {"inner_steps": 4, "overlap_steps": 4}}, "diloco.overlap_steps: expected 0 to under 4"),
        ({"rule": {"trim_fraction": 0.7}}, "rule.trim_fraction: expected"),
        ({"api": {"port": 70_000}}, "api.port: expected 0 to 65535, found 70000"),
        ({"discovery": {"announce_interval_s": 60, "announcement_lifetime_s": 30}}, "discovery."),
    ],
)
def test_what_makes_no_sense_is_told(values: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError) as told:
        from_mapping(RunConfig, values)
    assert str(told.value).startswith(said)


def test_names_that_people_give_are_taken() -> None:
    for name in ("gpu-7", "node_2", "host.example.org", "7", "alice@lab:3"):
        assert replace(RunConfig(), node_id=name, run_id=name).node_id == name


def test_the_store_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENESIS_STORE", "s3://bucket/prefix")
    assert RunConfig().data.store == "s3://bucket/prefix"
    assert from_mapping(RunConfig, {"data": {"store": "/elsewhere"}}).data.store == "/elsewhere"


@pytest.mark.parametrize("word", ["off", "Off", "no"])
def test_a_word_stays_a_word_and_a_switch_reads_it_as_one(word: str) -> None:
    values = merged(parse_override(f"api.enabled={word}"), parse_override("data.plateau=off"))
    config = from_mapping(RunConfig, values)
    assert (config.api.enabled, config.data.plateau) == (False, "off")
