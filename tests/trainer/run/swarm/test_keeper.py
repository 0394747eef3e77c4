"""Whom a run takes for the keeper of its account: a key among strangers, a name only where none can come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import TrainerUsageError
from trainer.run.cli.app import run
from trainer.run.config import RunConfig, from_mapping
from trainer.run.node.identity import identity_of, identity_path
from trainer.run.swarm.keeper import check_keeper, keeper_among

SEED = "/ip4/{}/tcp/4001/p2p/12D3KooWQYV9dGMFoRzNStwpXztXaBUjtPqi6aU76ZgUriHhKust"


def config_of(folder: Path, **options: Any) -> RunConfig:
    return from_mapping(RunConfig, {"node_id": "driver-2", "state_dir": str(folder), **options})


@pytest.mark.parametrize(
    ("options", "is_private"),
    [
        ({}, False),
        ({"discovery": {"allow_private": True}}, True),
        ({"rpc": {"host": "127.0.0.1"}}, True),
        ({"rpc": {"host": "192.168.1.4"}}, True),
        ({"rpc": {"host": "::"}}, False),
        ({"rpc": {"host": "0.0.0.0", "public_address": "10.0.0.4:4100"}}, True),
        ({"rpc": {"host": "127.0.0.1", "public_address": "8.8.8.8"}}, False),
        ({"discovery": {"initial_peers": ["10.0.0.1:4100", "[fe80::1]:4100"]}}, True),
        ({"discovery": {"initial_peers": ["10.0.0.1:4100", "8.8.8.8:4100"]}}, False),
        ({"discovery": {"initial_peers": ["swarm.example.org:4100"]}}, False),
        ({"discovery": {"initial_peers": [SEED.format("10.0.0.1")]}}, True),
        ({"discovery": {"initial_peers": [SEED.format("8.8.8.8")]}}, False),
        ({"discovery": {"initial_peers": ["127.0.0.1:4100"]}, "rpc": {"public_address": "8.8.8.8:4100"}}, False),
    ],
)
def test_a_name_is_believed_where_every_address_that_was_given_is_private(
    options: dict[str, Any], is_private: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, **options)
    assert config.is_private == is_private
    if is_private:
        check_keeper(config)
    else:
        with pytest.raises(TrainerUsageError, match="python -m trainer identity --node-id driver-1"):
            check_keeper(config)
    key = {"ledger": {"keeper": "a" * 64}}
    check_keeper(config_of(tmp_path, **options, swarm=key))
    assert not list(tmp_path.iterdir())


def test_the_keeper_itself_is_told_its_own_key(tmp_path: Path) -> None:
    config = config_of(tmp_path, node_id="driver-1", pipeline="swarm")
    with pytest.raises(TrainerUsageError) as refused:
        check_keeper(config)
    assert f"swarm: {{ledger: {{keeper: {identity_of(config).peer_id}}}}}" in str(refused.value)


@pytest.mark.parametrize("command", [["--pipeline", "swarm"], ["worker", "--stage", "head"]])
def test_a_process_that_strangers_can_reach_does_not_begin_with_a_name(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"state_dir={tmp_path}", "inner.micro_batch_size=2", f"data.store={tmp_path}"]
    arguments = [*command, "--node-id", "one", *(part for each in settings for part in ("--set", each))]
    assert run(arguments) == 2
    assert "swarm.ledger.keeper: expected a key" in capsys.readouterr().err


def test_a_key_is_made_beforehand_and_told_for_the_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["identity", "--node-id", "driver-1", "--set", f"state_dir={tmp_path}"]
    assert (run(command), run(command)) == (0, 0)
    said = capsys.readouterr()
    key = identity_of(config_of(tmp_path, node_id="driver-1")).peer_id
    assert said.out.split() == [key, key]
    assert f"keeper: {key}" in said.err


def test_a_swarm_on_one_machine_knows_its_keeper_beforehand(tmp_path: Path) -> None:
    config = config_of(tmp_path, node_id="swarm-up")
    names = ["driver-1", "driver-2"]
    found = keeper_among(config, names)
    assert found == ("driver-1", identity_of(replace(config, node_id="driver-1")).peer_id)
    assert not identity_path(replace(config, node_id="driver-2")).exists()
    key = identity_of(replace(config, node_id="driver-2")).peer_id
    assert keeper_among(config_of(tmp_path, swarm={"ledger": {"keeper": key}}), names) == ("driver-2", key)
    for other in ("driver-3", "b" * 64):
        with pytest.raises(TrainerUsageError, match=f"found {other}"):
            keeper_among(config_of(tmp_path, swarm={"ledger": {"keeper": other}}), names)
