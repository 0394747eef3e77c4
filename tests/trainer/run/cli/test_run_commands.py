"""`run init`, `sign`, `show` and `set`: what an owner does with a run's file, without a node of it being there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.trainer_command import TrainerHere
from trainer.run.config import RunConfig, from_mapping, merged
from trainer.run.signed.files import read_run_file
from trainer.run.signed.sources import check_agrees, options_of


@pytest.fixture
def run(here: TrainerHere, tmp_path: Path) -> Path:
    """A run file, with its key beside it."""
    printed = here.other("run", "init", "r", "--preset", "tiny", "--stages", "4", "--key", tmp_path / "run.key")
    path = tmp_path / "run.yaml"
    path.write_text(printed[printed.index("# The run") :], encoding="utf-8")
    return path


def test_a_run_is_made_with_a_key_of_its_own(run: Path, here: TrainerHere) -> None:
    file = read_run_file(run.read_bytes(), "run.yaml")
    file.verify("run.yaml")
    assert file.config["swarm"]["num_stages"] == 4
    assert file.config["inner"]["micro_batch_size"] == 8
    assert not file.says("data.store")
    assert not file.says("node_id")
    assert (run.parent / "run.key").stat().st_mode & 0o777 == 0o600
    said = here.other("run", "init", "r", "--preset", "tiny", "--key", run.parent / "run.key", expect=2)
    assert "expected no file, found one" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--preset: expected a size or shape"),
        (("--preset", "tiny", "--set", "node_id=x"), "node_id: expected what all nodes share"),
        (("--preset", "tiny", "--set", "inner.lr=-1"), "inner.lr: expected a learning rate above 0"),
        (("--preset", "tiny", "--authority", "me"), "authorities: expected a list of keys"),
        (("--preset", "tinier"), "tinier"),
        (("--preset", "tiny", "--whole-nodes"), "--whole-nodes: expected --stages"),
        (("--preset", "tiny", "--stages", "33", "--whole-nodes"), "swarm.whole_nodes: expected at most 32 stages"),
        (
            ("--preset", "tiny", "--stages", "2", "--whole-nodes", "--strategy", "grad"),
            "all would wait for the pipelines",
        ),
        (("--preset", "tiny", "--stages", "2", "--whole-nodes", "--strategy", "async_sparta"), "moments of their own"),
    ],
)
def test_runs_that_cannot_be_made_leave_no_key(
    here: TrainerHere, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in here.other("run", "init", "r", *arguments, "--key", tmp_path / "run.key", expect=2)
    assert not (tmp_path / "run.key").exists()


@pytest.mark.parametrize(
    ("options", "is_cut"),
    [
        ((), False),
        (("--stages", "3"), True),  # As many as by default: the options alone would not say so.
        (("--set", "swarm.stage.target_tokens=512"), True),
        (("--strategy", "async_sparta"), True),
        (("--stages", "2", "--whole-nodes"), True),
    ],
)
def test_a_run_says_whether_its_model_is_cut(
    here: TrainerHere, tmp_path: Path, options: tuple[str, ...], is_cut: bool
) -> None:
    rows = ("--batch-size", "8")
    printed = here.other("run", "init", "r", "--preset", "tiny", *rows, *options, "--key", tmp_path / "run.key")
    assert "r is open: whoever can reach a node of it may join" in printed
    body = printed[printed.index("# The run") :]
    (tmp_path / "run.yaml").write_text(body, encoding="utf-8")
    values, fetched = options_of(tmp_path / "run.yaml", ())
    assert fetched is not None
    config = from_mapping(RunConfig, merged(values, {"node_id": "a"}))
    assert fetched.file.is_of_stages(config) == is_cut
    assert config.swarm.whole_nodes == ("--whole-nodes" in options)
    assert fetched.file.layout == ("mixed" if config.swarm.whole_nodes else "stages" if is_cut else "whole")
    said_nothing = fetched.file.model_copy(update={"layout": None})
    assert b"layout" not in said_nothing.to_json()
    assert said_nothing.is_of_stages(config) == (is_cut and options != ("--stages", "3"))


@pytest.mark.parametrize(
    ("given", "keys", "urls"),
    [
        (("ab" * 32,), ["ab" * 32], []),
        (("https://a.example.org:4500",), ["own"], ["https://a.example.org:4500"]),
        (("ab" * 32, "https://a.example.org"), ["ab" * 32], ["https://a.example.org"]),
    ],
)
def test_a_run_says_who_admits_its_nodes_and_where(
    here: TrainerHere, tmp_path: Path, given: tuple[str, ...], keys: list[str], urls: list[str]
) -> None:
    options = [part for each in given for part in ("--authority", each)]
    printed = here.other("run", "init", "r", "--preset", "tiny", *options, "--key", tmp_path / "run.key")
    (tmp_path / "run.yaml").write_text(printed[printed.index("# The run") :], encoding="utf-8")
    values, fetched = options_of(tmp_path / "run.yaml", ())
    assert fetched is not None
    assert values["admission"]["authorities"] == [fetched.file.owner if key == "own" else key for key in keys]
    assert values["admission"]["urls"] == urls
    # A node may ask elsewhere, as where a proxy is on its way.
    elsewhere = merged(values, {"node_id": "a", "admission": {"urls": ["http://10.0.0.1:4500"]}})
    check_agrees(from_mapping(RunConfig, elsewhere), fetched)


def test_an_edited_file_is_signed_again(run: Path, here: TrainerHere) -> None:
    run.write_text(run.read_text().replace("seed: 0", "seed: 5", 1))
    said = here.other("run", "show", "--run", run, "--offline", expect=2)
    assert "found it changed since" in said
    assert "digest" in here.other("run", "sign", run, "--key", run.parent / "run.key")
    assert "seed=5" in here.other("run", "show", "--run", run, "--offline")
    other = run.with_name("other.key")
    here.other("run", "init", "o", "--preset", "tiny", "--key", other)
    assert "expected the key of its owner" in here.other("run", "sign", run, "--key", other, expect=2)


def test_changes_are_shown_and_kept_beside_the_file(run: Path, here: TrainerHere) -> None:
    key = ("--run", run, "--key", run.parent / "run.key")
    said = here.other("run", "set", "inner.lr=2e-4", "swarm.stage.target_tokens=524288", *key, expect=2)
    assert "--at-round: expected the round" in said
    said = here.other(
        *(
            "run",
            "set",
            "inner.lr=2e-4",
            "swarm.stage.target_tokens=524288",
            *key,
            "--at-round",
            "7",
            "--comment",
            "slow",
        )
    )
    assert "change 1 of r, in force from round 7" in said
    assert "inner.lr: 0.0002 (was 0.0001)" in said
    assert "no node was reached" in said
    here.other("run", "set", "rule.rule=median", *key, "--at-round", "7")
    assert "change 3" in here.other("run", "set", "rule.rule=mean", *key, "--at-round", "12")
    closed = here.other("run", "set", f"authorities=[{'ab' * 32}]", *key, "--at-round", "12", expect=2)
    assert "settled when it begins" in closed
    shown = here.other("run", "show", "--run", run)
    assert [line[:4] for line in shown.splitlines() if "signed 20" in line] == ["  1 ", "  2 ", "  3 "]
    assert "# slow" in shown
    told = json.loads(here.other("run", "show", "--run", run, "--json").splitlines()[-1])
    assert [change["at_round"] for change in told["changes"]] == [7, 7, 12]
    assert told["in_force"] is None
    assert told["nodes"] == []
    assert "changes of it" in here.other("run", "sign", run, "--key", run.parent / "run.key", expect=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("seed=3",), "seed: expected an option that may change"),
        (("inner.lr=-3",), "inner.lr: expected a learning rate above 0"),
        (("inner.lr=",), "expected a value behind the ="),
        (("=3",), "expected name.name=value"),
        (("inner.lr",), "inner.lr: expected a value behind the ="),
        (("inner.lr={a: 1}",), "expected a number, a word"),
        (("inner.lr=2e-4", "--at-round", "2"), "expected it in force from round 5 or later"),
        (("inner.lr=2e-4", "--at-round", "1000000000"), "--at-round: expected 10005 at most"),
    ],
)
def test_changes_that_cannot_be_made_are_not(
    run: Path, here: TrainerHere, arguments: tuple[str, ...], said: str
) -> None:
    key = ("--run", run, "--key", run.parent / "run.key")
    here.other("run", "set", "inner.lr=1e-3", *key, "--at-round", "5")
    before = run.with_name("run.changes.jsonl").read_bytes()
    rest = () if "--at-round" in arguments else ("--at-round", "9")
    assert said in here.other("run", "set", *arguments, *rest, *key, expect=2)
    assert run.with_name("run.changes.jsonl").read_bytes() == before


def test_the_table_of_what_may_change_is_printed(here: TrainerHere) -> None:
    assert "`target_tokens`" in here.other("run", "show", "--fields")
