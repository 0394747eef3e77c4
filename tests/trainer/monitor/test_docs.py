"""docs/observing.md names what is there."""

import json
import re
from pathlib import Path

from tests.support.observing import Report, Step
from trainer.monitor import EventLog, read_events
from trainer.monitor.status import Health, TrainingStatus, VerifyStatus

TEXT = (Path(__file__).parents[3] / "docs" / "observing.md").read_text(encoding="utf-8")
EXAMPLES = [json.loads(found) for found in re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)]


def test_the_examples_are_answers_of_this_release():
    verify, whole, health = EXAMPLES[:3]
    assert set(verify) == set(VerifyStatus.model_fields)
    assert set(whole) == set(TrainingStatus.model_fields) - set(VerifyStatus.model_fields)
    TrainingStatus.model_validate(verify | whole, strict=False)
    assert set(health) == set(Health.model_fields)


def test_every_field_is_explained():
    for name in (*VerifyStatus.model_fields, *TrainingStatus.model_fields):
        assert f"`{name}`" in TEXT or f"`{name}." in TEXT or f'"{name}"' in TEXT


def test_every_metric_is_listed(node):
    node.observer.step(Step())
    node.observer.round(Report(dropped=(("a", "dead"),)), outer_step=1, state_digest="d")
    node.observer.checkpoint("saved", step=1, seconds=0.1)
    node.refused["replayed"] += 1
    lines = node.metrics.page().decode().splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE genesis_training_")}
    for name in {name for name in names if not name.endswith("_created")}:
        assert re.search(rf"`{name.removeprefix('genesis_training_')}[`{{]", TEXT), name


def test_its_lines_are_what_the_log_writes(tmp_path):
    shown = [json.loads(line) for line in TEXT.splitlines() if line.startswith('{"') and '"kind":' in line]
    with EventLog(tmp_path, "gpu-7") as log:
        log.step(Step())
        log.round(Report(), outer_step=1, state_digest="d")
        log.event("checkpoint", outcome="saved", step=1, seconds=0.1)
    written = {event.kind: set(event.fields) for event in read_events(tmp_path)}
    assert {line["kind"]: set(line) - {"time", "node", "kind"} for line in shown} == written


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with EventLog(tmp_path / "logs", "gpu-7") as log:
        log.step(Step(step=3, loss=float("nan"), skipped=True))
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(block, "observing.md", "exec"), {})
    assert capsys.readouterr().out.endswith(" gpu-7 3.0 nan\n")
