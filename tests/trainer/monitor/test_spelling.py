"""Events as JSON lines."""

import json
import math
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import canonical_json
from tests.support.observing import Report, Step
from trainer.monitor.events import event_line, read_events, round_fields, step_fields

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.slow
@settings(deadline=None)
@given(fields=st.dictionaries(st.text().filter(lambda name: name not in ("time", "node", "kind")), JSON))
def test_any_value_is_one_canonical_line(fields):
    line = event_line(1_790_000_000.1239, "gpu-7", "odd", fields)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    value = json.loads(line)
    assert line == canonical_json(value) + b"\n"
    assert value["time"] == "2026-09-21T14:13:20.123Z"
    assert (value["node"], value["kind"]) == ("gpu-7", "odd")


def test_numbers_that_json_has_not_are_strings_that_float_reads():
    spelt = json.loads(event_line(0, "n", "k", {"x": [math.nan, math.inf, -math.inf, np.float32(0.5), np.int64(3)]}))
    assert spelt["x"] == ["NaN", "Infinity", "-Infinity", 0.5, 3]
    assert [str(float(text)) for text in spelt["x"][:3]] == ["nan", "inf", "-inf"]


def test_what_json_has_no_form_for_is_its_text():
    @dataclass(frozen=True)
    class Verdict:
        who: str
        cosine: float

    class Level(IntEnum):
        HIGH = 3

    endless: list[object] = []
    endless.append(endless)
    fields = {
        "path": Path("/tmp/x"),
        "verdict": Verdict("p", 0.25),
        "set": {"b", "a"},
        "bytes": b"ab",
        "level": Level.HIGH,
        "endless": endless,
        "half": "\ud800",
        "long": "x" * 100_000,
    }
    value = json.loads(event_line(0, "n", "k", fields))
    assert value["path"] == "/tmp/x"
    assert value["verdict"] == {"who": "p", "cosine": 0.25}
    assert value["set"] == ["a", "b"]
    assert value["bytes"] == "b'ab'"
    assert value["level"] == 3
    assert "..." in json.dumps(value["endless"])
    assert value["half"] == "\\ud800"
    assert len(value["long"]) == 4_097


def test_a_step_and_a_round_say_all_their_fields(tmp_path):
    step = Step(step=7, loss=math.nan, grad_norm=1 / 3, skipped=True)
    report = Report(dropped=(("c" * 64, "silent: 10 s"),), validation=({"cosine": math.inf},))
    (tmp_path / "events-n.jsonl").write_bytes(
        event_line(0, "n", "step", step_fields(step, 0.001))
        + event_line(1, "n", "round", round_fields(report, 3, "ab"))
    )
    first, second = read_events(tmp_path)
    assert math.isnan(first.number("loss"))
    assert dict(first.fields) | {"loss": 0} == {
        "step": 7, "loss": 0, "grad_norm": 0.3333333, "lr": 0.0001, "num_tokens": 4096, "skipped": True,
        "seconds": 0.25, "loader_wait_s": 0.001,
    }  # fmt: skip
    assert second.fields["dropped"] == [["c" * 64, "silent: 10 s"]]
    assert second.fields["members"] == list(report.members)
    assert second.fields["validation"] == [{"cosine": "Infinity"}]
    assert (second.fields["outer_step"], second.fields["state_digest"]) == (3, "ab")
