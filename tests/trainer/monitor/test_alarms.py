"""Alarms: each condition raises its own and nothing else; a quiet run raises none."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.observing import an_account
from trainer.monitor import TallyStatus
from trainer.monitor.alarms import AlarmLimits, RunFacts, alarms_of
from trainer.monitor.run_view import NodeSummary, StageSummary

LIMITS = AlarmLimits()


def a_stage(name: str = "head", **changes: Any) -> StageSummary:
    content = {"stage": name, "num_replicas": 2, "num_joining": 0, "version": 7, "rows_per_s": 10.0, "busy": 0.5}
    return StageSummary.model_validate(content | changes)


def a_node(name: str = "gpu-1", **changes: Any) -> NodeSummary:
    content: dict[str, Any] = dict.fromkeys(NodeSummary.model_fields, None)
    content |= {"node_id": name, "peer_id": "a" * 64, "role": "worker", "stage": "head", "status": "serving"}
    content |= {"health": "ok", "is_reached": True, "software": "1", "doubts": (), "checkpoint_age_s": 60.0}
    zeros = ("pflops", "hours", "tokens", "micro_batches", "rounds_shared", "rounds_alone", "rounds_failed")
    content |= dict.fromkeys((*zeros, "withdrawals", "tokens_per_s", "memory_bytes"), 0)
    return NodeSummary.model_validate(content | changes)


QUIET = RunFacts(
    stages=[a_stage("head"), a_stage("tail")],
    nodes=[a_node("gpu-1"), a_node("gpu-2", role="driver", stage="", checkpoint_age_s=None)],
    losses=[5.0 - 0.01 * look for look in range(100)],
    recent_rounds=[("head", True)] * 10 + [("head", False)] * 3,
    account=an_account(),
)


def test_a_run_that_goes_well_raises_none() -> None:
    assert alarms_of(QUIET, LIMITS) == ()


BROKEN = an_account(micro_batches=TallyStatus(leased=120, done=100, lost=3, open=16))
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("empty-stage", "head", "nobody serves", {"stages": [a_stage(num_replicas=0, num_joining=1), a_stage("tail")]}),
    ("one-replica", "tail", "1 replica", {"stages": [a_stage(), a_stage("tail", num_replicas=1)]}),
    ("no-checkpoint", "head", "61 min", {"nodes": [a_node(checkpoint_age_s=3660.0)]}),
    ("no-checkpoint", "run", "no checkpoint", {"nodes": [a_node(role="node", stage="", checkpoint_age_s=9e3)]}),
    ("loss-spike", "run", "9.000", {"losses": [*QUIET.losses, 9.0]}),
    ("clock", "gpu-1", "45 s ahead", {"nodes": [a_node(clock_offset_s=45.2)]}),
    ("clock", "gpu-1", "31 s behind", {"nodes": [a_node(clock_offset_s=-31.0)]}),
    ("failing-rounds", "tail", "3 of the latest 4", {"recent_rounds": [("tail", False)] * 3 + [("tail", True)]}),
    ("failing-rounds", "run", "4 of the latest 4", {"recent_rounds": [("", False)] * 4}),
    ("unreachable", "gpu-1", "does not answer", {"nodes": [a_node(health="unreachable", is_reached=False)]}),
    ("quiet", "gpu-1", "no reports (none)", {"nodes": [a_node(health="quiet")]}),
    ("contribution", "gpu-1", "too much", {"nodes": [a_node(health="doubtful", doubts=("claims too much",))]}),
    ("account", "run", "leased is not", {"account": BROKEN}),
]


@pytest.mark.parametrize(("kind", "subject", "text", "changes"), CASES, ids=[f"{it[0]}-{it[1]}" for it in CASES])
def test_each_condition_raises_its_own(kind: str, subject: str, text: str, changes: dict[str, Any]) -> None:
    facts = {name: getattr(QUIET, name) for name in ("stages", "nodes", "losses", "recent_rounds", "account")}
    [alarm] = alarms_of(RunFacts(**(facts | changes)), LIMITS)
    assert (alarm.kind, alarm.subject) == (kind, subject)
    assert text in alarm.text


HARMLESS: list[dict[str, Any]] = [
    {"nodes": [a_node(checkpoint_age_s=9e3), a_node("gpu-2")]},  # Another worker of the stage has a fresh one.
    {"nodes": [a_node(clock_offset_s=29.0)]},
    {"recent_rounds": [("tail", False)] * 3},  # Too few to tell.
    {"losses": [5.0] * 9 + [50.0]},  # Too few looks to tell.
    {"losses": [5.0] * 60 + [5.4]},  # Within a tenth.
    {"nodes": [a_node(health="gone", is_reached=False)]},
]


@pytest.mark.parametrize("changes", HARMLESS)
def test_what_is_usual_raises_none(changes: dict[str, Any]) -> None:
    assert alarms_of(RunFacts(**changes), LIMITS) == ()


def test_noise_on_a_falling_loss_is_no_spike_and_a_real_one_is() -> None:
    drawn = random.Random(5)
    losses: list[float] = []
    raised = 0
    for look in range(10_000):
        usual = 3.0 + 7.0 * 0.999**look
        losses.append(usual * drawn.gauss(1.0, 0.02))
        raised += bool(alarms_of(RunFacts(losses=losses[-61:]), LIMITS))
    assert not raised
    assert alarms_of(RunFacts(losses=[*losses[-60:], 1.25 * losses[-1]]), LIMITS)
