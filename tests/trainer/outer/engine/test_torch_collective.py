"""Rounds over real gloo groups: all ranks equal, and equal to the same computation in one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.support.rank_scenarios import (
    DILOCO,
    GROUP_TIMEOUT_S,
    LIAR,
    NUM_VALUES,
    ROUNDS,
    all_rounds,
    contribution_of,
    diloco,
    every_step,
    one_dies,
    run_ranks,
)
from tests.support.replica_group import Quadratic, Regression
from trainer.aggregation import cap_weights, contribution_weight, decide, moments, reduce_part
from trainer.compression.vectors import BLOCK_VALUES, codec_named
from trainer.errors import TrainerUsageError
from trainer.outer.engine.ddp import ddp_model
from trainer.outer.engine.torch_collective import RankedBytes, rank_slices

GROUP_SIZES = [1, 2, 4]


@pytest.fixture(scope="module", params=GROUP_SIZES, ids=lambda size: f"{size} ranks")
def ranks(request, tmp_path_factory) -> list[dict]:
    return run_ranks(all_rounds, request.param, tmp_path_factory.mktemp("ranks"))


def in_one_process(name: str, num_ranks: int) -> tuple[torch.Tensor, list[float]]:
    """The same round without processes: codec, decision and rule over whole vectors."""
    codec_name, rule, num_values, odd = ROUNDS[name]
    codec = codec_named(codec_name)
    contributions = [contribution_of(rank, num_values, odd) for rank in range(num_ranks)]
    weights, rows = [], torch.zeros(num_ranks, num_values)
    for row, contribution in zip(rows, contributions, strict=True):
        sent = contribution.vector if contribution.residual is None else contribution.vector + contribution.residual
        finite = bool(torch.isfinite(sent).all())
        weights.append(contribution_weight(contribution.num_batches, contribution.age_s) if finite else 0.0)
        if finite:
            codec.decode(codec.encode(sent), num_values, out=row)
    capped = cap_weights(weights)
    decision = decide(moments(rows, contributions[0].reference), capped, rule)
    result = reduce_part(rows, capped, rule, decision, contributions[0].reference)
    return codec.decode(codec.encode(result), num_values), capped


@pytest.mark.parametrize("name", ROUNDS)
def test_all_ranks_have_the_bits_of_a_single_process(ranks: list[dict], name: str) -> None:
    if name == "nan" and len(ranks) == 1:
        return
    expected, _ = in_one_process(name, len(ranks))
    vectors = [rank[name]["vector"] for rank in ranks]
    assert all(vector.numpy().tobytes() == vectors[0].numpy().tobytes() for vector in vectors)
    if ROUNDS[name][1].rule == "centered_clip":
        torch.testing.assert_close(vectors[0], expected)  # moments are summed by slice: another last bit
    else:
        assert torch.equal(vectors[0], expected)


def test_reports_are_alike_and_say_who_and_how(ranks: list[dict]) -> None:
    expected = torch.stack([contribution_of(rank).vector for rank in range(len(ranks))]).mean(dim=0)
    torch.testing.assert_close(ranks[0]["mean"]["vector"], expected)
    for rank in ranks:
        report = rank["mean"]
        assert report["members"] == [f"rank {rank}" for rank in range(len(ranks))] and report["dropped"] == []
    bytes_sent = sum(rank["mean"]["bytes"][0] for rank in ranks)
    assert bytes_sent == sum(rank["mean"]["bytes"][1] for rank in ranks)
    assert bytes_sent == 2 * (len(ranks) - 1) * 4 * NUM_VALUES, "as many as an all-reduce"
    assert ranks[0]["weighted"]["weights"] == [2.0, 3.0, 4.0, 9.0][: len(ranks)], "claims of batches are capped"


@pytest.mark.parametrize("name", ["nan", "idle"])
def test_who_brings_nothing_usable_is_left_out_and_gets_the_result(ranks: list[dict], name: str) -> None:
    if len(ranks) == 1:
        pytest.skip("needs a rank to leave out")
    report = ranks[LIAR][name]
    assert [who for who, _ in report["dropped"]] == [f"rank {LIAR}"]
    assert report["completeness"] == (len(ranks) - 1) / len(ranks)
    honest = torch.stack([contribution_of(rank).vector for rank in range(len(ranks)) if rank != LIAR]).mean(dim=0)
    torch.testing.assert_close(report["vector"], honest)


def relative_error(vector: torch.Tensor, num_ranks: int) -> float:
    honest = torch.stack([contribution_of(rank).vector for rank in range(num_ranks) if rank != LIAR]).mean(dim=0)
    return ((vector - honest).norm() / honest.norm()).item()


def test_robust_rules_withstand_one_lying_rank_of_four(ranks: list[dict]) -> None:
    if len(ranks) < 4:
        pytest.skip("robust among four")
    assert relative_error(ranks[0]["lied to, mean"]["vector"], 4) > 2, "or the test says nothing"
    for rule in ("by default", "median", "centered_clip", "enforce"):
        assert relative_error(ranks[0][f"lied to, {rule}"]["vector"], 4) < 0.35, rule
    for rule in ("by default", "enforce"):
        assert [who for who, _ in ranks[2][f"lied to, {rule}"]["dropped"]] == [f"rank {LIAR}"]
    assert [who for who, _ in ranks[2]["lied to, mean"]["validation"]] == [f"rank {LIAR}"], "log mode only says so"


def test_int8_leaves_a_residual_that_makes_up_for_it(ranks: list[dict]) -> None:
    assert all(rank["mean"]["residual"] is None for rank in ranks)
    codec = codec_named("int8")
    for number, rank in enumerate(ranks):
        contribution = contribution_of(number, odd="residual")
        whole = contribution.vector + contribution.residual
        sent = torch.empty(NUM_VALUES)
        for place in rank_slices(NUM_VALUES, len(ranks)):
            sent[place] = codec.decode(codec.encode(whole[place]), place.stop - place.start)
        residual = rank["int8"]["residual"]
        assert torch.equal(residual, whole - sent) and 0 < residual.abs().max() < 0.05


def test_rounds_that_cannot_be_fail_at_all_ranks_and_the_next_one_works(ranks: list[dict]) -> None:
    for rank in ranks:
        refused = rank["refused"]
        assert refused == ranks[0]["refused"]
        assert refused["afterwards"] == str(len(ranks))
    if len(ranks) == 4:
        refused = ranks[0]["refused"]
        assert "one round_index at all ranks, found [3, 3, 4, 3]" in refused["round"]
        assert "state, rule or codec" in refused["state"]
        assert "num_values" in refused["length"]


@pytest.mark.parametrize("num_values", [0, 1, 1024, 1025, 5000, 1 << 20])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_slices_cover_everything_at_block_borders(num_values: int, num_ranks: int) -> None:
    places = rank_slices(num_values, num_ranks)
    assert len(places) == num_ranks and places[0].start == 0 and places[-1].stop == num_values
    assert all(before.stop == after.start for before, after in pairwise(places))
    assert all(place.start % BLOCK_VALUES == 0 or place.start == num_values for place in places)
    sizes = [place.stop - place.start for place in places]
    assert max(sizes) - min(sizes) <= 2 * BLOCK_VALUES


def test_without_a_process_group_the_way_out_is_named() -> None:
    for needs_group in (RankedBytes, lambda: ddp_model(Quadratic(0))):
        with pytest.raises(TrainerUsageError, match="torchrun"):
            needs_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[dict]:
    return run_ranks(diloco, 2, tmp_path_factory.mktemp("diloco"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DILOCO)
def test_diloco_over_a_group(pair: list[dict], name: str) -> None:
    first, second = pair[0][name], pair[1][name]
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == len(first["digests"]) >= 10
    assert torch.equal(first["parameters"], second["parameters"]) == (name == "whole")
    assert not torch.equal(first["residual"], second["residual"]), "each rank's own, and not part of the digest"
    assert first["losses"][1] < 0.15 * first["losses"][0]


def test_a_dead_rank_ends_the_job_and_changes_nothing(tmp_path) -> None:
    results = run_ranks(one_dies, 3, tmp_path, may_die=frozenset({1}))
    assert results[1] is None and GROUP_TIMEOUT_S < 60
    for survivor in (results[0], results[2]):
        assert "is gone or silent" in survivor["error"]
        assert survivor["unchanged"] and survivor["rounds"] == 1


@pytest.mark.slow
def test_gradients_are_averaged_in_every_step(tmp_path) -> None:
    first, second = run_ranks(every_step, 2, tmp_path)
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["state"] == {"version": 1, "num_steps": 5}
    model, other = Regression(0), Regression(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        other.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        other.zero_grad()
        model(step).backward()
        other(step).backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad.add_(theirs.grad).div_(2)
        optimizer.step()
    alone = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(first["parameters"], alone)
