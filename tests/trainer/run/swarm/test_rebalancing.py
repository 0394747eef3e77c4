"""Which worker moves where and when: the slowest stage gains, nothing is emptied, nobody runs to and fro."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.swarm_bench.rebalancing import PipelinePlan, compare, simulate
from trainer.network.discovery.stage_report import StageReport, StageUid
from trainer.run.config.run import RebalanceConfig
from trainer.run.swarm.rebalancing import Move, Placed, Rebalancer, best_move, placed_workers, stage_rates

NAMES = ("head", "body-1", "tail")
FLOPS = {"head": 1.0, "body-1": 2.0, "tail": 1.0}
CONFIG = RebalanceConfig(patience_s=60.0, stay_s=0.0)


def placed(*rates: tuple[str, float], joining: str = "") -> list[Placed]:
    workers = [Placed(f"w{number}", stage, rate) for number, (stage, rate) in enumerate(rates)]
    return [*workers, Placed("new", joining, 0.0, False)] if joining else workers


NEEDY = placed(("head", 8.0), ("head", 8.0), ("head", 8.0), ("body-1", 2.0), ("tail", 8.0), ("tail", 6.0))
"""The body does 2 rows a second; with a head's worker, which does 4 there, 6."""


def rebalancer(key: str, stage: str, move_s: float = 30.0, config: RebalanceConfig = CONFIG) -> Rebalancer:
    return Rebalancer(config, key, stage, NAMES, FLOPS, lambda _: move_s)


def moved(rule: Rebalancer, workers: list[Placed], until_s: float, from_s: float = 0.0) -> tuple[float, Move] | None:
    now_s = from_s
    while now_s <= until_s:
        move = rule.look(workers, now_s)
        if move is not None:
            return now_s, move
        now_s += 2.0
    return None


def test_the_move_that_helps_the_slowest_stage_most_is_foretold() -> None:
    assert best_move(NEEDY[0], NAMES, NEEDY, FLOPS) == Move("w0", "body-1", 2.0, 6.0)
    assert best_move(NEEDY[3], NAMES, NEEDY, FLOPS) is None  # It would leave its stage empty.


WORKERS = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 100), st.booleans()), min_size=1, max_size=12).map(
    lambda them: [Placed(f"w{number}", *each) for number, each in enumerate(them)]
)


@given(WORKERS)
def test_a_move_empties_no_stage_and_makes_the_slowest_faster(workers: list[Placed]) -> None:
    for worker in workers:
        move = best_move(worker, NAMES, workers, FLOPS)
        if move is not None:
            others = [it for it in workers if it.stage == worker.stage and it is not worker and it.is_serving]
            assert others
            assert any(it.stage == move.to and it.is_serving for it in workers)
            assert move.after > move.before == min(stage_rates(NAMES, workers).values())


def test_an_empty_stage_is_gone_to_only_by_who_can_begin_it() -> None:
    workers = placed(("head", 8.0), ("head", 8.0), ("tail", 8.0), ("tail", 8.0))
    assert best_move(workers[0], NAMES, workers, FLOPS) is None
    found = best_move(workers[0], NAMES, workers, FLOPS, may_begin=lambda name: name == "body-1")
    assert found is not None
    assert (found.to, found.before) == ("body-1", 0.0)


@pytest.mark.parametrize("known_rate", [8.0, 0.0])
def test_a_worker_that_has_done_nothing_yet_goes_to_an_empty_stage_and_nowhere_else(known_rate: float) -> None:
    """While a stage is empty no rows pass, so that its rate would never be known."""
    workers = placed(("head", known_rate), ("head", 0.0), ("tail", 8.0))
    found = best_move(workers[1], NAMES, workers, FLOPS, may_begin=lambda name: name == "body-1")
    assert found is not None
    assert (found.to, found.before) == ("body-1", 0.0)
    assert moved(rebalancer("w1", "head"), workers, 100.0) is None  # It could not begin that stage.
    slow = [*workers, Placed("w3", "body-1", 0.1)]
    assert best_move(slow[1], NAMES, slow, FLOPS, may_begin=lambda _: True) is None


def test_one_goes_first_and_the_next_only_if_it_is_still_needed() -> None:
    times = {it.key: moved(rebalancer(it.key, it.stage), NEEDY, 1000.0) for it in NEEDY}
    went = sorted(found[0] for found in times.values() if found is not None)
    assert went[0] == 60.0
    assert went[1] >= went[0] + 20.0
    assert times["w3"] is None


def test_while_anybody_comes_or_goes_in_the_two_stages_none_moves() -> None:
    rule = rebalancer("w0", "head")
    assert moved(rule, NEEDY, 58.0) is None
    came = [*NEEDY, Placed("w9", "head", 8.0)]
    assert rule.look(came, 60.0) is None
    first = moved(rebalancer("w0", "head"), came, 500.0)
    again = moved(rule, came, 560.0, from_s=60.0)
    assert first is not None
    assert again is not None
    assert again[0] == first[0] + 60.0


def test_it_stays_where_the_cost_is_more_than_the_gain() -> None:
    # Some 30 rows are won in each second, and a third of the head's work is lost meanwhile.
    assert moved(rebalancer("w0", "head", move_s=30.0), NEEDY, 1000.0) is not None
    assert moved(rebalancer("w0", "head", move_s=1e5), NEEDY, 1000.0) is None
    little = placed(("head", 8.0), ("head", 8.0), ("body-1", 14.5), ("tail", 15.0))
    assert moved(rebalancer("w0", "head"), little, 1000.0) is None


def test_after_a_move_it_stays_for_a_while_and_does_not_go_back() -> None:
    config = RebalanceConfig(patience_s=60.0, stay_s=300.0)
    after = [Placed("w0", "body-1", 4.0), *NEEDY[1:]]
    assert moved(rebalancer("w0", "body-1", config=config), after, 2000.0) is None
    early = rebalancer("w1", "head", config=config)
    early.began_s = 100.0
    found = moved(early, NEEDY, 2000.0, from_s=100.0)
    assert found is not None
    assert found[0] >= 100.0 + 300.0 + 60.0


def test_a_rate_that_nobody_else_comes_near_counts_for_little() -> None:
    rates = stage_rates(NAMES, placed(("head", 2.0), ("head", 2.0), ("head", 1e9), ("body-1", 1.0), ("tail", 1.0)))
    assert rates["head"] == 12.0


def test_workers_that_leave_are_not_there_and_unknown_rates_are_those_of_the_slowest() -> None:
    def report(stage: str, status: str, rate: float) -> StageReport:
        uid = str(StageUid(stage, 40))
        return StageReport.model_validate({"uid": uid, "incarnation": "0" * 16, "status": status, "rows_per_s": rate})

    reports = {
        "a": report("head", "serving", 4.0),
        "b": report("head", "joining", 0.0),
        "c": report("tail", "leaving", 9.0),
    }
    workers = placed_workers(reports)
    assert {it.key for it in workers} == {"a", "b"}
    assert stage_rates(NAMES, workers) == {"head": 8.0, "body-1": 0.0, "tail": 0.0}


@pytest.mark.slow
def test_in_the_simulation_it_does_more_than_either_other_rule_with_few_moves() -> None:
    report = compare(PipelinePlan(stay_s=7200.0), seeds=3)
    assert report["ours"] > 1.03 * report["stay"]
    assert report["ours"] > 1.03 * report["swarm"]
    assert report["ours_moves_per_h"] < 6.0


@pytest.mark.parametrize("stay_s", [900.0, 7200.0])
def test_where_nothing_can_be_gained_nobody_moves(stay_s: float) -> None:
    dear = PipelinePlan(stay_s=stay_s, move_s=1e5, duration_s=3600.0)
    assert simulate("ours", dear).moves == 0
    assert simulate("ours", dear).done == simulate("stay", dear).done
