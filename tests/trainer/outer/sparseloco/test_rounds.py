"""SparseLoCo over the peers' collective and over torch ranks: bit-identical, sparse on the wire, and robust."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.rank_scenarios import run_ranks
from tests.support.round_actor import RUN_ID, KnownPeers, identity_of, terms
from trainer.aggregation import RuleConfig
from trainer.aggregation.sparse import SparseVector, aggregate_sparse
from trainer.collective import CollectiveConfig, PeerCollective
from trainer.compression.sparse import SPARSE, ChunkOrder
from trainer.errors import RoundFailedError
from trainer.network.rpc import Endpoint, RpcConfig
from trainer.outer.diloco import DiLoCoTrainer
from trainer.outer.engine.chunk_order import ChunkedCollective
from trainer.outer.engine.collective import Collective, Contribution, LocalCollective, RoundResult
from trainer.outer.engine.torch_sparse import SparseTorchCollective
from trainer.outer.sparseloco import SparseLoCoConfig
from trainer.run.node.loop_thread import LoopThread

SHAPES = ((256, 192), (100,), (64, 130))
NUM_VALUES = 256 * 192 + 100 + 64 * 130
DECAY = 0.95
RULE = RuleConfig()  # The default, which under sparse rounds is the clipped mean.


def difference(member: int, round_index: int = 0) -> Tensor:
    """A member's pseudo-gradient: what all have in common, and noise of its own."""
    common = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(1000 + round_index)) ** 3
    noise = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(100 * round_index + member))
    return common + 0.5 * noise


def contribution(vector: Tensor, residual: Tensor | None = None, round_index: int = 0) -> Contribution:
    return Contribution(
        round_index=round_index,
        vector=vector,
        num_batches=25,
        age_s=0.0,
        reference=torch.zeros_like(vector),
        state_digest="ab" * 32,
        residual=residual,
    )


class Member:
    def __init__(self, number: int) -> None:
        self.loop = LoopThread(f"member-{number}")
        self.loop.start()
        rpc = RpcConfig(host="127.0.0.1", tls=False, heartbeat_s=0.2, stall_timeout_s=10.0, stop_grace_s=0.1)
        self.endpoint = Endpoint(identity_of(number), RUN_ID, rpc)
        self.directory = KnownPeers(holds_most_held_state=True)
        config = CollectiveConfig(
            compression="sparse", invite_after_s=0.2, gather_timeout_s=20.0, stall_timeout_s=8.0, round_timeout_s=120.0
        )
        self.peers = PeerCollective(
            self.endpoint, self.loop.loop, RUN_ID, terms(), RULE, config, self.directory, lambda: 1024
        )
        self.collective = ChunkedCollective(self.peers, lambda _round_index: SHAPES, DECAY)
        self.loop.run(self.endpoint.start(), 20)

    def close(self) -> None:
        self.peers.close()
        self.loop.run(self.endpoint.stop(), 20)
        self.loop.stop()


@pytest.fixture(scope="module")
def members():
    found = [Member(60 + number) for number in range(4)]
    for member in found:
        member.directory.known = {other.endpoint.peer_id: other.endpoint.peer for other in found if other is not member}
    yield found
    for member in found:
        member.close()


def round_of(members: list[Member], contributions: list[Contribution]) -> list[RoundResult]:
    for member, each in zip(members, contributions, strict=True):
        member.peers.move_to(each.round_index)
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda pair: pair[0].collective.reduce(pair[1]), zip(members, contributions, strict=True)))


def in_one_process(carried: list[Tensor], weights: list[float]) -> tuple[Tensor, list[Tensor]]:
    """Result and residuals without any process: encoded and decoded whole, in the order of the members."""
    order = ChunkOrder.of(SHAPES)
    decoded: list[SparseVector] = []
    residuals = []
    for vector in carried:
        ordered = order.chunked(vector)
        sparse = SPARSE.decode_sparse(SPARSE.encode(ordered), NUM_VALUES)
        sparse.subtract_from(ordered)
        decoded.append(sparse)
        residuals.append(order.natural(ordered))
    return order.natural(aggregate_sparse(decoded, weights, RULE).vector), residuals


def test_peers_end_bit_identical_with_what_one_process_computes_and_send_little(members: list[Member]) -> None:
    by_id = sorted(range(4), key=lambda number: members[number].endpoint.peer_id)
    residuals: list[Tensor | None] = [None] * 4
    for round_index in range(3):
        vectors = [difference(number, round_index) for number in range(4)]
        given = [contribution(v, r, round_index) for v, r in zip(vectors, residuals, strict=True)]
        results = round_of(members, given)
        carried = [v if r is None else v + r * DECAY for v, r in zip(vectors, residuals, strict=True)]
        expected, left = in_one_process([carried[number] for number in by_id], [5.0] * 4)
        for position, number in enumerate(by_id):
            result = results[number]
            assert torch.equal(result.vector, expected)
            assert torch.equal(result.residual, left[position])
            assert result.report.rule == "clipped_mean"
            assert result.report.completeness == 1.0
            assert len(result.report.result_digest) == 64
            assert {finding.reason for finding in result.report.findings} == {""}
            sent_bits, _ = result.report.bits_per_value
            assert sent_bits == 8 * result.report.sent_bytes / NUM_VALUES
            assert 0 < (result.vector != 0).double().mean() < 0.07
            # What the members' messages cost beside the tensors (agreement, vote) is the same for any model.
            assert result.report.sent_bytes < 4 * SPARSE.encoded_bytes(NUM_VALUES) + 40_000
        residuals = [result.residual for result in results]


def test_a_liar_among_peers_is_left_out_by_all_and_keeps_nothing(members: list[Member]) -> None:
    given = [contribution(difference(number, 7), round_index=7) for number in range(4)]
    liar = 2
    given[liar] = replace(given[liar], vector=-given[liar].vector)
    results = round_of(members, given)
    name = members[liar].endpoint.peer_id
    for result in results:
        assert torch.equal(result.vector, results[0].vector)
        assert [who for who, _ in result.report.dropped] == [name]
    assert results[liar].residual is None
    assert results[0].residual is not None


def test_a_member_without_batches_takes_the_result_and_keeps_its_residual(members: list[Member]) -> None:
    given = [contribution(difference(number, 9), round_index=9) for number in range(4)]
    residual = torch.ones(NUM_VALUES)
    given[1] = replace(given[1], vector=torch.zeros(NUM_VALUES), num_batches=0, residual=residual)
    results = round_of(members, given)
    assert all(torch.equal(result.vector, results[0].vector) for result in results)
    assert torch.allclose(results[1].residual, residual * DECAY)


def one_round(rank: int, num_ranks: int) -> dict[str, object]:
    collective = ChunkedCollective(SparseTorchCollective(RULE), lambda _round_index: SHAPES, DECAY)
    vector, residual = difference(rank), difference(rank, 1)
    found = collective.reduce(contribution(vector, residual))
    odd = vector if rank else torch.full_like(vector, torch.nan)
    without_first = collective.reduce(contribution(odd, residual))
    try:
        collective.reduce(replace(contribution(vector), state_digest=str(rank)))
        refused = ""
    except RoundFailedError as error:
        refused = str(error)
    return {
        "vector": found.vector,
        "residual": found.residual,
        "bytes": found.report.sent_bytes,
        "dropped": [who for who, _ in without_first.report.dropped],
        "kept": without_first.residual,
        "refused": refused,
    }


def test_torch_ranks_end_bit_identical_with_what_one_process_computes(tmp_path: Path) -> None:
    ranks = run_ranks(one_round, 3, tmp_path)
    carried = [difference(rank) + difference(rank, 1) * DECAY for rank in range(3)]
    expected, residuals = in_one_process(carried, [5.0] * 3)
    for rank, found in enumerate(ranks):
        assert torch.equal(found["vector"], expected)
        assert torch.equal(found["residual"], residuals[rank])
        assert found["bytes"] == 2 * SPARSE.encoded_bytes(NUM_VALUES)
        assert found["dropped"] == ["rank 0"]
        assert "expected one state" in found["refused"]
    assert torch.allclose(ranks[0]["kept"], difference(0, 1) * DECAY), "what was not finite left nothing behind"


class Alone:
    """A collective of one that encodes as the others do, and whose rounds fail when told to."""

    def __init__(self) -> None:
        self.fails = False

    def reduce(self, given: Contribution) -> RoundResult:
        if self.fails:
            raise RoundFailedError("told to")
        carried = given.vector if given.residual is None else given.vector + given.residual
        sparse = SPARSE.decode_sparse(SPARSE.encode(carried), carried.numel())
        residual = carried.clone()
        sparse.subtract_from(residual)
        return replace(LocalCollective().reduce(given), vector=sparse.dense(), residual=residual)

    def requested(self) -> bool:
        return False

    def close(self) -> None:
        pass


def strategy(model: nn.Module, collective: Collective, **options: object) -> DiLoCoTrainer:
    config = SparseLoCoConfig(inner_steps=2, **options)  # type: ignore[arg-type]
    return DiLoCoTrainer(model, config.cadence(), collective, residual_decay=config.decay)


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(130, 70), nn.Linear(70, 3))


def trained(model: nn.Module, trainer: DiLoCoTrainer, num_steps: int, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
                parameter.sub_(0.01 * noise)
        trainer.after_inner_step()


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("lr", [1.0, 0.65])
def test_the_outer_step_is_that_of_the_paper(lr: float) -> None:
    model, alone = model_of(), Alone()
    trainer = strategy(model, alone, outer_lr=lr)
    order = ChunkOrder.of([tuple(each.shape) for each in model.parameters()])
    theta, error = parameters(model), torch.zeros(order.num_values)
    for start in range(0, 8, 2):
        trained(model, trainer, 2, start)
        local = theta.clone()
        for step in range(start, start + 2):
            generators = [torch.Generator().manual_seed(step) for _ in model.parameters()]
            shapes = [each.shape for each in model.parameters()]
            noises = [torch.randn(shape, generator=it).flatten() for shape, it in zip(shapes, generators, strict=True)]
            local = local - 0.01 * torch.cat(noises)
        carried = order.chunked(theta - local) + order.chunked(error) * DECAY
        sent = SPARSE.decode_sparse(SPARSE.encode(carried), order.num_values).dense()
        theta, error = theta - lr * order.natural(sent), order.natural(carried - sent)
        assert torch.allclose(parameters(model), theta, atol=1e-6)
        assert torch.allclose(trainer.state_dict()["fragments"][0]["residual"], error, atol=1e-6)


def test_a_failed_round_changes_neither_error_feedback_nor_state_and_loses_no_work() -> None:
    model, alone = model_of(), Alone()
    trainer = strategy(model, alone)
    trained(model, trainer, 2)
    before, residual = trainer.state_digest(), trainer.state_dict()["fragments"][0]["residual"]
    alone.fails = True
    trained(model, trainer, 2, 2)
    assert trainer.state_digest() == before
    assert torch.equal(trainer.state_dict()["fragments"][0]["residual"], residual)
    moved = parameters(model)
    alone.fails = False
    trained(model, trainer, 2, 4)
    assert trainer.round_index == 2
    carried = trainer.state_dict()["fragments"][0]["residual"]
    assert (carried.norm() + 1e-9) > residual.norm(), "the work of both rounds is in what is sent and what waits"
    assert not torch.equal(moved, parameters(model))


@pytest.mark.parametrize("options", [{}, {"num_fragments": 2}, {"overlap_steps": 1}])
def test_a_node_resumes_bit_for_bit(options: dict[str, int]) -> None:
    model, other = model_of(), model_of()
    trainer = strategy(model, Alone(), **options)
    trained(model, trainer, 7)
    saved, weights = trainer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    trained(model, trainer, 6, 7)
    trainer.drain()
    other.load_state_dict(weights)
    resumed = strategy(other, Alone(), **options)
    resumed.load_state_dict(saved)
    trained(other, resumed, 6, 7)
    resumed.drain()
    assert resumed.round_index == trainer.round_index >= 5
    assert torch.equal(parameters(other), parameters(model))
    assert resumed.state_digest() == trainer.state_digest()
    pairs = zip(resumed.state_dict()["fragments"], trainer.state_dict()["fragments"], strict=True)
    assert all(torch.equal(ours["residual"], theirs["residual"]) for ours, theirs in pairs)


def test_a_joiner_takes_the_parameters_and_begins_without_error_feedback() -> None:
    model, joiner = model_of(), model_of(1)
    trainer = strategy(model, Alone())
    trained(model, trainer, 4)
    joined = strategy(joiner, Alone())
    joined.adopt(trainer.shared_state())
    assert joined.state_digest() == trainer.state_digest()
    assert torch.equal(parameters(joiner), parameters(model))
    assert joined.state_dict()["fragments"][0]["residual"] is None


def test_digests_change_with_every_round() -> None:
    model = model_of()
    trainer = strategy(model, Alone())
    digests = []
    for start in range(0, 6, 2):
        trained(model, trainer, 2, start)
        digests.append(trainer.state_digest())
    assert all(before != after for before, after in pairwise(digests))
