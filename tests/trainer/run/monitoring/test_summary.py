"""From looks to what is shown: whom the account bears out, who is gone, what the run does, whatever nodes claim."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.announcements import announcement
from tests.support.observing import an_account
from trainer.monitor.history import History, SeenReport
from trainer.monitor.run_text import run_line, run_lines
from trainer.monitor.run_view import NodeSummary, RunView
from trainer.network.discovery.node_report import DhtTraffic, NodeReport, ReportedRound
from trainer.network.discovery.stage_report import PartReport, StageReport
from trainer.network.rpc.identity import Identity
from trainer.run.monitoring.summary import RunSummary
from trainer.run.monitoring.watcher import Look, WatchedNode

KEYS = [Identity.create() for _ in range(6)]
STAGES = ("head", "body-1", "tail")
EACH = 1e12


def a_node(number: int, stage: str = "", *, at: float = 1000.0, role: str = "", **fields: Any) -> WatchedNode:
    """One that answers and reports; ``fields`` are of its report, ``said`` of its announcement."""
    key = KEYS[number]
    said: dict[str, Any] = fields.pop("said", {})
    if stage:
        uid = f"{stage.replace('-', '')}.0.{40 + number}"
        report = {"uid": uid, "incarnation": f"{number:016x}", "status": "serving", "version": 10, "rows_per_s": 4.0}
        said = {"stage": StageReport.model_validate(report | said)}
    role = role or ("worker" if stage else "node")
    content = {"peer_id": key.peer_id, "node_id": f"n{number}", "run_id": "run", "incarnation": f"{number:016x}"}
    report = NodeReport.model_validate(content | {"role": role, "stage": stage} | fields).stamped(at - 5.0, 180.0)
    known = announcement(key, node_id=f"n{number}", **said).stamped(at - 1.0, 60.0)
    return WatchedNode(key.peer_id, at, known, report, is_reached=True)


def a_worker(number: int, stage: str, claimed: int, **fields: Any) -> WatchedNode:
    return a_node(number, stage, micro_batches=claimed, flops=claimed * EACH, active_s=3600.0, **fields)


def seen(*nodes: WatchedNode, at: float = 1000.0, **fields: Any) -> Look:
    return Look(at=at, nodes={node.peer_id: node for node in nodes}, **fields)


def shown(look: Look, history: History | None = None, **options: Any) -> RunView:
    if history is not None:
        return RunSummary("run", history, stages=STAGES, **options).take(look)
    with History(None, "run", clock=lambda: look.at) as fresh:
        return RunSummary("run", fresh, stages=STAGES, **options).take(look)


def the(view: RunView, number: int) -> NodeSummary:
    return next(node for node in view.nodes if node.node_id == f"n{number}")


def test_what_the_account_bears_out_is_confirmed_and_what_it_does_not_is_doubted() -> None:
    nodes = [a_worker(number, stage, 1000) for number, stage in enumerate(STAGES)]
    liar = a_worker(3, "tail", 50_000)
    counts = {f"{number:016x}": 990 for number in range(4)}
    view = shown(seen(*nodes, liar, account=an_account(), counts=counts, keeper=KEYS[5].peer_id))
    for number in range(3):
        assert the(view, number).confirmed_pflops == pytest.approx(990 * EACH / 1e15)
        assert the(view, number).health == "ok"
    assert the(view, 3).health == "doubtful"
    assert the(view, 3).confirmed_pflops == pytest.approx(990 * EACH / 1e15)
    assert [(it.kind, it.subject) for it in view.alarms if it.kind == "contribution"] == [("contribution", "n3")]
    assert any("a driver that says it keeps it" in text for text in view.unverified)


def test_a_process_that_the_account_never_heard_of_has_nothing_confirmed() -> None:
    honest, unheard = a_worker(0, "head", 1000), a_worker(1, "head", 1000)
    view = shown(seen(honest, unheard, account=an_account(), counts={f"{0:016x}": 1000}))
    assert the(view, 1).confirmed_pflops == 0.0
    assert the(view, 1).doubts
    # An earlier release's keeper counts no workers: then nothing is confirmed, and nobody is doubted.
    view = shown(seen(honest, unheard, account=an_account()))
    assert the(view, 1).confirmed_pflops is None
    assert not the(view, 1).doubts


def test_who_takes_the_name_of_anothers_process_gets_nothing_of_its_work() -> None:
    honest = a_worker(0, "head", 1000)
    thief = a_worker(1, "head", 1000, incarnation=f"{0:016x}")
    look = {"account": an_account(), "counts": {f"{0:016x}": 1000}}
    with History(None, "run", clock=lambda: 1000.0) as history:
        summary = RunSummary("run", history)
        summary.take(seen(honest, **look))
        view = summary.take(seen(honest, thief, **look))
        assert the(view, 0).confirmed_pflops == pytest.approx(1.0)
        assert (the(view, 1).confirmed_pflops, the(view, 1).health) == (0.0, "doubtful")
    view = shown(seen(honest, thief, **look))  # They come together: nobody can tell.
    assert {the(view, number).health for number in (0, 1)} == {"doubtful"}


def test_with_a_run_file_a_claim_of_too_many_flops_is_seen_of_a_single_worker() -> None:
    inflated = a_node(0, "head", micro_batches=1000, flops=1000 * 50 * EACH)
    look = seen(inflated, account=an_account(), counts={f"{0:016x}": 1000})
    assert the(shown(look), 0).confirmed_pflops == pytest.approx(50.0)  # Nothing tells better.
    view = shown(look, flops={"head": EACH})
    assert the(view, 0).confirmed_pflops == pytest.approx(1.0)
    assert "FLOPs a micro-batch" in the(view, 0).doubts[0]


def test_lives_are_added_up_and_who_has_left_is_still_known() -> None:
    with History(None, "run", clock=lambda: 1000.0) as history:
        shown(seen(a_worker(0, "head", 1000)), history)
        second = a_worker(0, "head", 500, at=2000.0, incarnation="f" * 16)
        view = shown(seen(second, at=2000.0), history)
        assert the(view, 0).pflops == pytest.approx(1.5)
        assert the(view, 0).hours == pytest.approx(2.0)
        view = shown(seen(at=3000.0), history)
        assert (the(view, 0).health, the(view, 0).pflops) == ("gone", pytest.approx(1.5))
        assert view.progress.num_nodes == 0


def test_stages_are_those_of_the_run_and_only_who_answers_is_a_replica() -> None:
    nodes = [a_worker(0, "head", 1), a_worker(1, "tail", 1), a_worker(2, "tail", 1)]
    nodes[2].is_reached = False
    view = shown(seen(*nodes))
    assert [(it.stage, it.num_replicas) for it in view.stages] == [("head", 1), ("body-1", 0), ("tail", 1)]
    assert ("empty-stage", "body-1") in {(it.kind, it.subject) for it in view.alarms}
    assert ("unreachable", "n2") in {(it.kind, it.subject) for it in view.alarms}


def test_a_driver_need_not_be_reachable_and_a_silent_node_is_quiet_after_a_while() -> None:
    driver = a_node(0, role="driver")
    driver.is_reached = False
    silent = a_node(1)
    silent.report = None
    with History(None, "run", clock=lambda: 1000.0) as history:
        summary = RunSummary("run", history)
        view = summary.take(seen(driver, silent))
        assert (the(view, 0).health, the(view, 1).health) == ("ok", "ok")
        view = summary.take(seen(driver, silent, at=1300.0))
        assert (the(view, 0).health, the(view, 1).health) == ("ok", "quiet")


def test_rounds_are_put_together_from_what_members_say() -> None:
    def rounds(seconds: float, error: str = "") -> tuple[ReportedRound, ...]:
        return tuple(
            ReportedRound(
                round_index=index, ended_at=990.0 + index, num_members=3, completeness=1.0, seconds=seconds, error=error
            )
            for index in range(4)
        )

    nodes = [a_node(number, rounds=rounds(seconds)) for number, seconds in enumerate((1.0, 2.0, 99.0))]
    failing = a_node(3, rounds=rounds(0.0, "no member left"))
    view = shown(seen(*nodes, failing))
    assert [it.round_index for it in view.rounds] == [3, 2, 1, 0]
    newest = view.rounds[0]
    assert (newest.num_reports, newest.num_failed, newest.seconds) == (4, 1, 2.0)
    assert newest.error == "no member left"
    assert the(view, 3).health == "failing"
    assert not [it for it in view.alarms if it.kind == "failing-rounds"]  # Most members have a result.


def test_rates_are_between_two_reports_of_one_life() -> None:
    node = a_node(0, sent_bytes=1000, dht=DhtTraffic(stores=10, finds=100, records=7))
    later = a_node(0, at=1060.0, sent_bytes=7000, dht=DhtTraffic(stores=70, finds=220, records=8))
    assert node.report is not None and later.report is not None
    node.take(later.report)
    view = shown(seen(node, at=1060.0))
    assert the(view, 0).sent_bytes_per_s == 100.0
    assert view.dht is not None
    assert (view.dht.stores_per_s, view.dht.finds_per_s, view.dht.records) == (1.0, 2.0, 8)
    another = a_node(0, at=1120.0, incarnation="f" * 16)
    assert another.report is not None
    node.take(another.report)
    assert the(shown(seen(node, at=1120.0)), 0).sent_bytes_per_s is None


def test_a_liar_moves_the_loss_by_little_and_no_line_of_a_terminal() -> None:
    honest = [a_node(number, said={"loss": 3.0 + number / 10}) for number in range(4)]
    alone = shown(seen(*honest))
    liar = a_node(4, said={"loss": 99.0}, checkpoint_problem="\x1b[2J")
    liar.said = liar.said and liar.said.model_copy(update={"node_id": "evil"})
    view = shown(seen(*honest, liar))
    assert alone.progress.loss is not None and view.progress.loss is not None
    assert abs(view.progress.loss - alone.progress.loss) < 0.3
    assert all(line.isprintable() for line in run_lines(view))
    assert run_line(view).isprintable()
    assert RunView.model_validate_json(view.model_dump_json()) == view


def test_a_run_of_which_nobody_answers_is_an_alarm() -> None:
    assert [(it.kind, it.subject) for it in shown(seen()).alarms] == [("unreachable", "run")]
    assert not shown(seen(a_node(0))).alarms


def test_records_from_the_future_are_an_alarm() -> None:
    view = shown(seen(a_node(0), num_future=3))
    assert [(it.kind, it.subject) for it in view.alarms if it.kind == "clock"] == [("clock", "run")]


def test_absurd_figures_of_whoever_likes_stop_nothing_and_hide_no_round() -> None:
    most = 2**53 - 1
    rounds = tuple(ReportedRound(round_index=most, ended_at=9e10, error="x") for _ in range(4))
    absurd = {"flops": 9e29, "num_tokens": most, "micro_batches": most, "active_s": 9e10, "sent_bytes": most}
    good = ReportedRound(round_index=3, ended_at=990.0, num_members=2, completeness=1.0, seconds=1.0)
    with History(None, "run", clock=lambda: 1000.0) as history:
        for life in range(3):
            liars = [
                a_node(number, at=1000.0 + life, rounds=rounds, incarnation=f"{life:016x}", memory_bytes=most, **absurd)
                for number in range(5)
            ]
            view = shown(seen(*liars, a_node(5, rounds=(good,)), at=1000.0 + life), history)
        for _ in range(1_100):  # As many lives as it likes, each with the most a report may claim.
            history.add_reports(
                [SeenReport(at=1.0, peer_id="f" * 64, node_id="f", incarnation=f"{_:016x}", role="node", tokens=most)],
                [],
            )
        view = shown(seen(*liars, at=1010.0), history)
        assert [look.tokens for look in history.looks(1010.0)] == [min(view.progress.trained_tokens or 0, 2**63 - 1)]
    assert [it.round_index for it in view.rounds] == [3]
    assert not [it for it in view.alarms if it.kind == "failing-rounds"]
    assert RunView.model_validate_json(view.model_dump_json()) == view
    assert all(line.isprintable() for line in run_lines(view))


def test_a_whole_node_beside_a_swarm_reports_rounds_of_every_stage() -> None:
    parts = tuple(PartReport(stage=stage, status="serving", outer_step=3) for stage in STAGES)
    rounds = tuple(ReportedRound(round_index=3, ended_at=900.0, num_members=2, stage=stage) for stage in STAGES)
    whole = a_node(3, rounds=rounds, said={"parts": parts, "outer_step": 3})
    view = shown(seen(*(a_worker(number, stage, 10) for number, stage in enumerate(STAGES)), whole))
    assert {it.stage for it in view.rounds} == set(STAGES)
    assert (the(view, 3).role, the(view, 3).stage, the(view, 3).step) == ("node", "", 3)
    # Before its first report, what it announces tells that it holds all stages.
    unreported = WatchedNode(whole.peer_id, 1000.0, whole.said, None, is_reached=True)
    assert the(shown(seen(unreported)), 3).role == "node"
