"""docs/swarm.md: its run file is one, its table of options is complete and tells the defaults, its answers are ours."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.pipeline_view import an_account
from trainer.monitor import SwarmAccount
from trainer.network.discovery import DiscoveryConfig
from trainer.run.config import RunConfig, from_mapping
from trainer.run.config.run import SwarmConfig

TEXT = (Path(__file__).parents[4] / "docs" / "swarm.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*?) \| .+ \|$", re.MULTILINE)
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _options(config: Any, where: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _options(value, f"{where}{field.name}.")
        else:
            yield f"{where}{field.name}", value


def _spelt(text: str) -> object:
    """The value a cell of the table says."""
    plain = text.strip("`").replace(",", "")
    number, _, unit = plain.partition(" ")
    if unit in _UNITS:
        return int(number) * _UNITS[unit]
    return {"none": "", "by cut": ()}.get(plain, yaml.safe_load(plain))


def test_the_run_file_is_one() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config = from_mapping(RunConfig, yaml.safe_load(block))
    assert config.swarm.num_stages == 4 and config.discovery.partition_by_stage


def test_the_table_has_every_option_with_its_default() -> None:
    told = {name: _spelt(value) for name, value in _ROW.findall(TEXT) if "." in name}
    options = dict(_options(SwarmConfig(), "swarm."))
    shown = ("allow_private", "partition_by_stage", "num_partitions")
    options |= {f"discovery.{name}": getattr(DiscoveryConfig(), name) for name in shown}
    assert set(told) == set(options)
    assert {name: value for name, value in told.items() if value != options[name]} == {}


def test_the_account_is_an_answer_of_this_release() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    account = SwarmAccount.model_validate_json(block)
    assert set(json.loads(block)) == set(an_account().model_dump())
    assert account.micro_batches.adds_up and account.tokens.adds_up
