"""The page of Prometheus, as a scraper reads it."""

from __future__ import annotations

import itertools
import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.observing import Announced, Report, Step
from tests.trainer.monitor.conftest import observed_node
from trainer.monitor import MeteredIterator

P = "genesis_training_"


def read(node):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(node.metrics.page().decode())
        for sample in family.samples
    }


def value(found, name, **labels):
    return found[P + name, frozenset(labels.items())]


def test_steps_are_counted_with_their_units(node):
    for index in range(10):
        node.observer.step(Step(step=index, loss=4.5, seconds=0.2), loader_wait_s=0.01)
    node.observer.step(Step(step=10, loss=math.nan, grad_norm=math.inf, skipped=True, seconds=5.0))
    found = read(node)
    expected = {"steps_total": 11, "skipped_steps_total": 1, "tokens_total": 11 * 4096, "loss_nats": 4.5}
    expected |= {"gradient_norm": 0.5, "learning_rate": 1e-4, "step_index": 10, "step_seconds_count": 11}
    assert {name: value(found, name) for name in expected} == expected
    assert value(found, "step_seconds_bucket", le="0.3") == 10
    assert abs(value(found, "loader_wait_seconds_total") - 0.1) < 1e-9
    assert value(found, "node_info", node_id="gpu-7", run_id="run") == 1


def test_rounds_are_counted_by_outcome_and_the_dropped_by_reason(node):
    node.observer.round(Report(), outer_step=1, state_digest="d")
    node.observer.round(
        Report(members=("f" * 64,), dropped=(("a", "dead: silent for 10 s"), ("b", "Not finite")), completeness=0.5),
        outer_step=2,
        state_digest="e",
    )
    node.observer.round_failed(3, "deadline")
    found = read(node)
    assert [value(found, "rounds_total", outcome=name) for name in ("shared", "alone", "failed")] == [1, 1, 1]
    expected = {"round_seconds_count": 2, "round_completeness_ratio": 0.5, "outer_step": 2}
    assert {name: value(found, name) for name in expected} == expected
    assert [value(found, "round_bytes_total", direction=name) for name in ("sent", "received")] == [2_000, 4_000]
    assert [value(found, "dropped_members_total", reason=name) for name in ("dead", "not_finite")] == [1, 1]


def test_what_others_count_is_read_with_the_page(node):
    node.refused.update({"replayed": 2, "Protocol": 3})
    node.observer.checkpoint("saved", step=10, seconds=0.25)
    node.observer.checkpoint("skipped", step=20, seconds=0.0)
    node.observer.peers([Announced("a" * 64), Announced("b" * 64)])
    found = read(node)
    assert [value(found, "rpc_refused_total", reason=name) for name in ("replayed", "protocol")] == [2, 3]
    assert [value(found, "rpc_bytes_total", direction=name) for name in ("sent", "received")] == [70, 80]
    assert [value(found, "checkpoints_total", outcome=name) for name in ("saved", "skipped")] == [1, 1]
    assert [value(found, name) for name in ("lost_events_total", "checkpoint_seconds_total", "peers")] == [3, 0.25, 2]


def test_what_is_not_known_is_not_on_the_page(node):
    found = read(node)
    for name in ("hash_agreement_percent", "sync_success_percent", "global_loss_nats"):
        assert (P + name, frozenset()) not in found
    node.observer.step(Step(loss=2.0))
    node.observer.round(Report(), outer_step=1, state_digest="d")
    found = read(node)
    assert value(found, "hash_agreement_percent") == value(found, "sync_success_percent") == 100
    assert value(found, "global_loss_nats") == 2.0


def test_other_nodes_cannot_add_series_without_end(node):
    node.refused.update({f"made-up-{number}": 1 for number in range(1_000)})
    node.refused.update({"x" * 500: 1, 'quote"\n': 1, "": 1})
    dropped = tuple((f"{number}", f"why{number}: because") for number in range(1_000))
    node.observer.round(Report(dropped=dropped), outer_step=1, state_digest="d")
    for _ in range(2):
        found = read(node)
        for name in ("rpc_refused_total", "dropped_members_total"):
            series = {key: count for key, count in found.items() if key[0] == P + name}
            assert len(series) <= 33
            assert value(found, name, reason="other") >= 968
    assert len(node.metrics.page()) < 30_000


def test_nodes_in_one_process_do_not_share_figures_and_every_metric_has_a_help_text(node, client):
    other = observed_node()
    other.observer.step(Step())
    assert (value(read(node), "steps_total"), value(read(other), "steps_total")) == (0, 1)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert answer.content.count(b"# TYPE") == node.metrics.page().count(b"# TYPE")
    assert all(line.split(" ", 3)[3:] for line in answer.text.splitlines() if line.startswith("# HELP genesis_"))


def test_the_items_come_through_and_the_wait_is_taken_once(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr("trainer.monitor.metrics.time.perf_counter", lambda: next(ticks) * 0.5)
    batches = MeteredIterator([1, 2])
    assert list(itertools.islice(batches, 2)) == [1, 2]
    with pytest.raises(StopIteration):
        next(batches)
    assert batches.take_wait_s() == 1.5
    assert batches.take_wait_s() == 0.0
