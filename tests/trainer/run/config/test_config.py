"""Plain values to dataclasses and back, mistakes told by name, and docs/swarm.md, which has every option of a swarm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.observing import an_account
from trainer.errors import TrainerUsageError
from trainer.monitor import SwarmAccount
from trainer.network.discovery import DiscoveryConfig
from trainer.outer.grad import GradConfig
from trainer.run.config import (
    RunConfig,
    changed_options,
    from_mapping,
    merged,
    read_yaml,
    to_mapping,
    to_yaml,
)
from trainer.run.config.reading import SECRET, parse_override
from trainer.run.config.run import SwarmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    rate: float = 0.5
    names: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    password: str = field(default="", metadata=SECRET)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise TrainerUsageError(f"rate: expected 0 or more, found {self.rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    count: int = 3
    kind: Literal["red", "blue"] = "red"
    is_on: bool = False
    part: Part = field(default_factory=Part)


wholes = st.builds(
    Whole,
    count=st.integers(),
    kind=st.sampled_from(["red", "blue"]),
    is_on=st.booleans(),
    part=st.builds(
        Part,
        rate=st.floats(0, 1e30),
        names=st.lists(st.text(max_size=5), max_size=3).map(tuple),
        weights=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    ),
)


@pytest.mark.slow
@given(wholes)
def test_yaml_and_changed_options_give_back_what_they_were_given(whole: Whole) -> None:
    assert from_mapping(Whole, yaml.safe_load(to_yaml(whole))) == whole
    whole = replace(whole, part=replace(whole.part, weights={}))  # Their names can be no part of an option's name.
    values: dict[str, Any] = {}
    for name, value in changed_options(whole).items():
        values = merged(values, parse_override(f"{name}={yaml.safe_dump(value, default_flow_style=True, width=10**9)}"))
    assert from_mapping(Whole, values) == whole


def test_what_is_at_its_default_is_not_among_the_changed() -> None:
    assert changed_options(Whole(count=4, part=Part(weights={"a": 1.0}))) == {"count": 4, "part.weights": {"a": 1.0}}
    assert from_mapping(RunConfig, yaml.safe_load(to_yaml(RunConfig()))) == RunConfig()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"cuont": 1}, "cuont: there is no such option; did you mean count?"),
        ({"part": {"raet": 1}}, "part.raet: there is no such option; did you mean rate?"),
        ({"part": 7}, "part: expected a mapping of options, found 7"),
        ({"part": {"rate": "fast"}}, "part.rate: input should be a valid number"),
        ({"part": {"rate": -1}}, "part.rate: expected 0 or more, found -1.0"),
        ({"kind": "green"}, "kind: input should be 'red' or 'blue', found 'green'"),
    ],
)
def test_mistakes_are_told_with_the_name_of_the_option(values: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError) as told:
        from_mapping(Whole, values)
    assert str(told.value).startswith(said)
    assert "\n" not in str(told.value)


def test_a_secret_is_read_and_never_comes_out() -> None:
    whole = from_mapping(Whole, {"part": {"password": "hunter2"}})
    assert whole.part.password == "hunter2"
    assert "hunter2" not in f"{to_mapping(whole)} {to_yaml(whole)} {changed_options(whole)}"
    with pytest.raises(TrainerUsageError) as told:
        from_mapping(Whole, {"part": {"password": 4711}})
    assert "4711" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a\n- b\n", "expected a mapping of options, found list"),
        (b"a: [1\nb: hunter2", "expected YAML, found"),
        (b"\xff\xfe\xff", r"run\.yaml: expected"),
        (None, r"run\.yaml: cannot be read: No such file"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TrainerUsageError, match=said) as told:
        read_yaml(path)
    assert "hunter2" not in str(told.value)
    assert "\n" not in str(told.value)
    path.write_text("# nothing yet\n")
    assert read_yaml(path) == {}


NO_OVERRIDES = [(text, "--set") for text in ("lr", "=1", "inner..lr=1", "inner.lr.=1", "a b=1", "inner.lr=[1")]


@pytest.mark.parametrize("nothing", ["", " ", "null", "~"])
def test_an_override_without_a_value_takes_back_what_the_file_says(nothing: str) -> None:
    file = {"count": 7, "kind": "blue", "part": {"rate": 2.0, "names": ["a"], "weights": {"a": 1.0, "b": 2.0}}}

    def overridden(*texts: str) -> Whole:
        values: dict[str, Any] = file
        for text in texts:
            values = merged(values, parse_override(text))
        return from_mapping(Whole, values)

    assert overridden(f"count={nothing}", f"part.names={nothing}") == Whole(
        kind="blue", part=Part(rate=2.0, weights={"a": 1.0, "b": 2.0})
    )
    assert overridden(f"part.weights.a={nothing}").part.weights == {"b": 2.0}
    assert overridden(f"part={nothing}").part == Part()
    assert overridden(f"part={nothing}", "part.rate=3").part == Part(rate=3.0), "what comes later wins"
    for text, said in ((f"cuont={nothing}", "cuont: there is no such option; did you mean count"), *NO_OVERRIDES):
        with pytest.raises(TrainerUsageError, match=said):
            overridden(text)


@pytest.mark.parametrize("order", [("part=3", "part.rate=2"), ("part.rate=2", "part=3")])
def test_a_value_where_options_belong_is_told_whatever_comes_after_it(order: tuple[str, str]) -> None:
    values: dict[str, Any] = {}
    with pytest.raises(TrainerUsageError, match=r"^part: expected a mapping of options, found 3$"):
        for text in order:
            values = merged(values, parse_override(text))
        from_mapping(Whole, values)


def test_what_yaml_is_odd_about_is_taken_as_it_is_meant_and_what_lies_above_wins_name_by_name() -> None:
    assert from_mapping(Whole, yaml.safe_load("part: {rate: 3e-4}")).part.rate == 3e-4  # Text, to YAML 1.1.
    assert from_mapping(Whole, yaml.safe_load("part:\ncount: 4")) == Whole(count=4)  # A heading with nothing under it.
    assert parse_override('part.password=""') == {"part": {"password": ""}}, "an empty text is a value"
    below = {"a": 1, "part": {"x": 1, "y": {"z": 1}}, "list": [1, 2]}
    above = {"part": {"y": {"z": 2}}, "list": [3]}
    assert merged(below, above) == {"a": 1, "part": {"x": 1, "y": {"z": 2}}, "list": [3]}
    assert below["part"] == {"x": 1, "y": {"z": 1}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"strategy": "ddp"}, "strategy ddp: expected engine torch"),
        ({"engine": "torch", "discovery": {"initial_peers": ["10.0.0.1:4001"]}}, "engine torch: expected no initial"),
        ({"engine": "torch", "rpc": {"port": 4001}}, "engine torch: expected no initial_peers, no port and no relay"),
        ({"max_steps": -1}, "max_steps: expected 0 or more, found -1"),
        ({"node_id": "../../etc"}, "node_id: expected"),
        ({"run_id": "a/b"}, "run_id: expected"),
        ({"data": {"timeout_s": float("nan")}}, "data.timeout_s: expected a number of seconds above 0, found nan"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep: expected 1 or more, found 0"),
        ({"diloco": {"inner_steps": 4, "overlap_steps": 4}}, "diloco.overlap_steps: expected 0 to under 4"),
        ({"discovery": {"announce_interval_s": 60, "announcement_lifetime_s": 30}}, "discovery."),
        ({"swarm": {"vocab_rows": 1000}}, "swarm.vocab_rows: expected 0 or a multiple of 1024, found 1000"),
        ({"swarm": {"activation_codec": "subspace+fp16"}}, "swarm.activation_codec: expected swarm.subspace.rank"),
    ],
)
def test_what_makes_no_sense_is_told(values: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainerUsageError) as told:
        from_mapping(RunConfig, values)
    assert str(told.value).startswith(said)


def test_words_and_the_store_of_the_environment_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GENESIS_STORE", "s3://bucket/prefix")
    assert RunConfig().data.store == "s3://bucket/prefix"
    for word in ("off", "Off", "no"):  # A word stays a word, and a switch reads it as one.
        values = merged(parse_override(f"api.enabled={word}"), parse_override("data.plateau=off"))
        config = from_mapping(RunConfig, values)
        assert (config.api.enabled, config.data.plateau) == (False, "off")


TEXT = (Path(__file__).parents[4] / "docs" / "swarm.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `([a-z_.]+)` \| (.*?) \| .+ \|$", re.MULTILINE)
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _options(config: Any, where: str) -> Iterator[tuple[str, Any]]:
    for option in fields(config):
        value, name = getattr(config, option.name), f"{where}{option.name}"
        yield from _options(value, f"{name}.") if is_dataclass(value) else [(name, value)]


def _spelt(text: str) -> object:
    """The value a cell of the table says."""
    plain = text.strip("`").replace(",", "")
    number, _, unit = plain.partition(" ")
    if unit in _UNITS:
        return int(number) * _UNITS[unit]
    return {"none": "", "by cut": (), "any driver": ()}.get(plain, yaml.safe_load(plain))


def test_the_table_has_every_option_with_its_default() -> None:
    told = {name: _spelt(value) for name, value in _ROW.findall(TEXT) if "." in name}
    options = dict(_options(SwarmConfig(), "swarm."))
    shown = ("allow_private", "partition_by_stage", "num_partitions")
    options |= {f"discovery.{name}": getattr(DiscoveryConfig(), name) for name in shown}
    options |= dict(_options(GradConfig(), "grad."))
    assert set(told) == set(options)
    assert {name: value for name, value in told.items() if value != options[name]} == {}


def test_the_run_file_is_one_and_the_account_an_answer_of_this_release() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    config = from_mapping(RunConfig, yaml.safe_load(block))
    assert config.swarm.num_stages == 4 and config.discovery.partition_by_stage
    (block,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    account = SwarmAccount.model_validate_json(block)
    assert set(json.loads(block)) == set(an_account().model_dump())
    assert account.micro_batches.adds_up and account.tokens.adds_up


@pytest.mark.parametrize("module", ["trainer.run.config", "trainer.run.monitoring.process"])
def test_what_only_reads_options_or_watches_a_run_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_strategy_is_found_where_people_look_for_it() -> None:
    assert parse_override("outer.strategy=sparseloco") == parse_override("strategy=sparseloco")
