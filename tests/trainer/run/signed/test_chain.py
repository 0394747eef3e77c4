"""Changes count in one order, once, for one run, and are in force by the round alone; nothing goes back."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.signed_runs import OWNER, chain_of, run_file, wire_of
from trainer.errors import RunFileError
from trainer.network.discovery.records import RecordRefusedError
from trainer.network.rpc.identity import Identity
from trainer.run.config import RunConfig, from_mapping, merged
from trainer.run.signed import ChangeChain, SignedRun
from trainer.run.signed.chain import with_settings
from trainer.run.signed.run import keep_run, run_folder

FILE = run_file()


@given(st.lists(st.integers(0, 30), max_size=8).map(sorted), st.integers(0, 31))
def test_what_is_in_force_follows_from_the_round_alone(at_rounds: list[int], round_index: int) -> None:
    chain = chain_of(FILE, *at_rounds)
    number = chain.number_at(round_index)
    assert number == sum(at_round <= round_index for at_round in at_rounds)
    assert chain.settings_by(number).get("inner.lr") == (number * 1e-4 if number else None)


@settings(max_examples=15)
@given(st.permutations(range(6)))
def test_in_whatever_order_they_come_the_chain_is_the_same(order: list[int]) -> None:
    whole, known = chain_of(FILE, *range(6)), ChangeChain(FILE)
    wires = whole.newer_than({})
    for _attempt in range(6):
        for place in order:
            try:
                known.offer(wires[place])
            except RecordRefusedError as error:
                assert error.reason in ("order", "known")
    assert known.newer_than({}) == wires


def _refused(chain: ChangeChain, wire: bytes) -> str:
    before = chain.newer_than({})
    with pytest.raises(RecordRefusedError) as refused:
        chain.offer(wire)
    assert "\n" not in str(refused.value)
    assert chain.newer_than({}) == before
    return refused.value.reason


def test_what_has_no_place_in_the_chain() -> None:
    chain, other = chain_of(FILE, 3, 5), run_file(Identity.create())
    assert _refused(chain, chain.newer_than({})[0]) == "known"  # Replayed.
    assert _refused(chain, wire_of(FILE, chain, number=2)) == "fork"  # Its owner signed two of one number.
    assert _refused(chain, wire_of(FILE, chain, number=4)) == "order"
    assert _refused(chain, wire_of(FILE, chain, previous=FILE.digest())) == "other"
    assert _refused(chain, wire_of(FILE, chain, at_round=4)) == "round"
    assert _refused(chain, wire_of(FILE, chain, signer=Identity.create())) == "signer"
    assert _refused(chain, wire_of(FILE, chain, run_id="corpus-9")) == "run"
    assert _refused(chain, wire_of(FILE, chain, issued_at=time.time() + 3600)) == "future"
    of_other_run = chain_of(run_file(seed=1), 3)  # The same owner's run of another file, but of one name.
    assert _refused(ChangeChain(FILE), of_other_run.newer_than({})[0]) == "other"
    assert other.owner != FILE.owner


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 3}, "seed: expected an option that may change"),
        ({"node_id": "x"}, "node_id: expected an option that may change"),
        ({"inner.lr": -1.0}, "inner.lr: expected a learning rate above 0"),
        ({"inner.lr": "fast"}, "inner.lr: input should be a valid number"),
        ({"inner.warmup_steps": 60_000}, "inner.decay_end_step: expected more than warmup_steps"),
        ({"inner.decay_end_tokens": 1_000_000}, "inner.decay_end_tokens: expected a schedule"),
        ({"diloco.inner_steps": 0}, "diloco.inner_steps: expected 1 or more"),
        ({"rule.rule": "majority"}, "rule.rule"),
        ({"authorities": ("me",)}, "authorities: expected a list of keys"),
        ({"authorities": "ab" * 32}, "authorities: expected a list of keys"),
    ],
)
def test_changes_that_make_no_sense(settings: dict[str, Any], said: str) -> None:
    chain = chain_of(FILE, 3)
    with pytest.raises(RecordRefusedError) as refused:
        chain.offer(wire_of(FILE, chain, settings=settings))
    assert refused.value.reason == "settings"
    assert str(refused.value).startswith(said)
    assert chain.newest == 1


def test_several_settings_are_checked_together_and_over_those_before() -> None:
    chain = ChangeChain(FILE)
    chain.offer(wire_of(FILE, chain, settings={"inner.warmup_steps": 60_000, "inner.decay_end_step": 90_000}))
    with pytest.raises(RecordRefusedError):
        chain.offer(wire_of(FILE, chain, settings={"inner.decay_end_step": 50_000}))
    chain.offer(wire_of(FILE, chain, settings={"swarm.stage.clip_factor": "inf", "rule.num_byzantine": 2}))
    config = chain.config_with({})
    assert (config.inner.warmup_steps, config.swarm.stage.clip_factor, config.rule.num_byzantine) == (
        60_000,
        math.inf,
        2,
    )


def test_who_admits_nodes_changes_at_a_round_too() -> None:
    file = FILE.model_copy(update={"authorities": ("cd" * 32,)}).signed(OWNER)
    chain = ChangeChain(file)
    chain.offer(wire_of(file, chain, at_round=4, settings={"authorities": ("ab" * 32,)}))
    assert chain.authorities_at(3) == ("cd" * 32,)
    assert chain.authorities_at(4) == ("ab" * 32,)
    with pytest.raises(RecordRefusedError, match="expected some, as in the run's file"):
        chain.offer(wire_of(file, chain, settings={"authorities": ()}))
    with pytest.raises(RecordRefusedError, match="expected none, as in the run's file"):
        ChangeChain(FILE).offer(wire_of(FILE, settings={"authorities": ("ab" * 32,)}))


def _kept(folder: Path, file=FILE, **options: Any) -> RunConfig:
    values = {**file.config, "run_id": file.name, "run_digest": file.digest(), "node_id": "n"}
    return from_mapping(RunConfig, merged(values, {"checkpoint": {"directory": str(folder)}, **options}))


def test_what_was_known_is_known_after_a_restart_and_to_other_nodes_of_the_machine(tmp_path: Path) -> None:
    config, whole = _kept(tmp_path), chain_of(FILE, 3, 5, 9)
    keep_run(FILE, whole.newer_than({})[:1], config, "run.yaml")
    one, two = SignedRun.open(config), SignedRun.open(config)
    assert one is not None
    assert two is not None
    for wire in whole.newer_than({})[1:]:
        one.chain.offer(wire)
    two.chain.offer(whole.newer_than({})[1])  # Behind what the other has written: the file keeps the longer chain.
    again = SignedRun.open(config)
    assert again is not None
    assert again.chain.changes == whole.changes


def test_an_older_file_of_changes_does_not_take_back_what_is_known(tmp_path: Path) -> None:
    config, whole = _kept(tmp_path), chain_of(FILE, 3, 5)
    keep_run(FILE, whole.newer_than({}), config, "run.yaml")
    keep_run(FILE, whole.newer_than({})[:1], config, "run.yaml")
    run = SignedRun.open(config)
    assert run is not None
    assert run.chain.newest == 2


def test_changes_believed_before_are_believed_by_a_wrong_clock_too(tmp_path: Path) -> None:
    config = _kept(tmp_path)
    keep_run(FILE, chain_of(FILE, 3).newer_than({}), config, "run.yaml")
    chain = ChangeChain(FILE, run_folder(config) / "changes.jsonl", clock=lambda: 0.0)
    chain.load()
    assert chain.newest == 1
    assert _refused(chain, wire_of(FILE, chain)) == "future"


@pytest.mark.parametrize("damage", ["cut", "swapped", "other"])
def test_a_damaged_file_of_changes_is_refused_with_a_line(tmp_path: Path, damage: str) -> None:
    config, wires = _kept(tmp_path), chain_of(FILE, 3, 5).newer_than({})
    keep_run(FILE, wires, config, "run.yaml")
    lines = {
        "cut": [wires[0], wires[1][:-9]],
        "swapped": wires[::-1],
        "other": chain_of(run_file(seed=1), 1).newer_than({}),
    }
    (run_folder(config) / "changes.jsonl").write_bytes(b"\n".join(lines[damage]))
    with pytest.raises(RunFileError, match=r"changes\.jsonl: change \d cannot be used") as refused:
        SignedRun.open(config)
    assert "\n" not in str(refused.value)


def test_a_run_has_one_file_for_good(tmp_path: Path) -> None:
    keep_run(FILE, (), _kept(tmp_path), "run.yaml")
    other = run_file(seed=5)
    with pytest.raises(RunFileError, match="a run's file never changes"):
        keep_run(other, (), _kept(tmp_path, other), "run.yaml")
    with pytest.raises(RunFileError, match="run_digest: expected the run file"):
        SignedRun.open(_kept(tmp_path, other))
    assert SignedRun.open(RunConfig()) is None


def test_a_node_keeps_what_is_its_own_under_every_change(tmp_path: Path) -> None:
    config = _kept(tmp_path, inner={"compile": "off"}, swarm={"worker": {"max_batch_size": 3}})
    wires = chain_of(FILE, 2).newer_than({})
    keep_run(FILE, wires, config, "run.yaml")
    run = SignedRun.open(config)
    assert run is not None
    assert run.config_by(0) is config
    assert run.config_by(1) == with_settings(config, {"inner.lr": 1e-4})
    assert run.config_by(1).inner.compile == "off"
    assert run.options_at(1) == (config.rule, config.collective)
    assert run.number_at(1) == 0
    assert run.trained_by() == 0
    assert OWNER.peer_id == FILE.owner
