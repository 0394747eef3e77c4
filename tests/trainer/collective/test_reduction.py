"""A reducer's numbers, and what it keeps of what members send it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from tests.support.round_actor import agreement_of
from trainer.aggregation import RuleConfig, decide
from trainer.collective.arithmetic import Arithmetic, Payload, TaskResult, add_sums
from trainer.collective.planning import first_plan
from trainer.collective.reduction import Reduction
from trainer.compression.vectors import codec_named
from trainer.errors import CodecError
from trainer.network.rpc import Frame

NUM_VALUES = 10_000


def arithmetic_of(number: int = 0, *, codec: str = "fp32", rule: str = "mean", validation: str = "log") -> Arithmetic:
    vector = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(number))
    config = RuleConfig(rule=rule, validation=validation)
    return Arithmetic(agreement_of(5, NUM_VALUES), codec_named(codec), config, vector, torch.zeros(NUM_VALUES))


def decoded(own: Arithmetic, part: int, payload) -> torch.Tensor:
    values = torch.zeros(NUM_VALUES)
    own.decode_result(part, payload, values)
    return values[slice(*own.agreement.part_bounds(part))]


def contributions(codec: str = "fp32", rule: str = "mean"):
    members = [arithmetic_of(number, codec=codec, rule=rule) for number in range(5)]
    return members, dict(zip(members[0].agreement.peer_ids, members, strict=True))


def part_of(by_id: dict[str, Arithmetic], part: int) -> dict[str, Payload]:
    return {peer_id: member.encode_own(part) for peer_id, member in by_id.items()}


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_all_parts_together_are_the_mean_of_what_was_sent(codec):
    members, by_id = contributions(codec)
    own = members[0]
    result = torch.zeros(NUM_VALUES)
    for task in first_plan(own.agreement).tasks:
        held = TaskResult(task, own, result)
        for part in range(task.first_part, task.last_part):
            held.add(part, own.reduce(part, part_of(by_id, part)).payload)
        assert held.complete
    mean = torch.stack([member.vector for member in members]).mean(0)
    tolerance = {"fp32": 1e-6, "fp16": 2e-3, "int8": 6e-2}[codec]
    assert float((result - mean).abs().max()) < tolerance


@pytest.mark.parametrize("bad", [b"", b"\x00" * 7, b"\xff" * 4096, torch.full((1024,), torch.nan).numpy().tobytes()])
def test_a_contribution_that_is_garbage_is_left_out_and_named(bad):
    members, by_id = contributions()
    own, payloads = members[0], part_of(by_id, 0)
    liar, start, stop = own.agreement.peer_ids[3], *own.agreement.part_bounds(0)
    reduced = own.reduce(0, payloads | {liar: bad})
    honest = torch.stack([member.vector[start:stop] for peer_id, member in by_id.items() if peer_id != liar]).mean(0)
    assert torch.allclose(decoded(own, 0, reduced.payload), honest, atol=1e-6)
    assert set(reduced.dropped) == {liar} and reduced.num_included == 4
    nothing_usable = own.reduce(0, {liar: bad}).payload
    assert torch.equal(decoded(own, 0, nothing_usable), torch.zeros(stop - start))


def test_a_result_that_is_not_finite_is_not_taken():
    own = arithmetic_of()
    start, stop = own.agreement.part_bounds(0)
    with pytest.raises(CodecError, match="finite"):
        decoded(own, 0, torch.full((stop - start,), torch.inf).numpy().tobytes())


def test_krum_over_parts_takes_one_whole_member() -> None:
    members, by_id = contributions(rule="krum")
    own = members[0]
    for position, member in enumerate(members):
        member.vector.mul_(0.01 if position else 50.0).add_(1.0)
    payloads = [part_of(by_id, part) for part in range(own.agreement.num_parts)]
    total = add_sums([own.measure(part, arrived) for part, arrived in enumerate(payloads)])
    decision = decide(total, [1.0] * len(members), own.rule)
    reduced = [own.reduce(part, arrived, decision).payload for part, arrived in enumerate(payloads)]
    result = torch.cat([decoded(own, part, payload) for part, payload in enumerate(reduced)])
    assert any(torch.equal(result, member.vector) for member in members[1:])
    del payloads[0][own.agreement.peer_ids[2]]
    assert own.measure(0, payloads[0]).finite.tolist() == [True, True, False, True, True], "missing: as not finite"


def test_what_int8_leaves_unsaid_is_the_difference_to_what_others_decode() -> None:
    own = arithmetic_of(codec="int8")
    own = replace(own, residual=own.vector.clone())
    heard = [decoded(own, 0, own.encode_own(0))]
    start, _ = own.agreement.part_bounds(1)
    assert torch.equal(own.residual[start:], own.vector[start:]), "what was sent to nobody is unsaid altogether"
    heard += [decoded(own, part, own.encode_own(part)) for part in range(1, own.agreement.num_parts)]
    assert torch.equal(own.residual, own.vector - torch.cat(heard))
    assert 0 < float(own.residual.abs().max()) < 0.05


def test_parts_of_a_result_come_in_order_or_not_at_all():
    own = arithmetic_of()
    task = first_plan(own.agreement).tasks[0]
    held = TaskResult(task, own, torch.zeros(NUM_VALUES))
    with pytest.raises(CodecError, match="expected part"):
        held.add(task.first_part + 1, own.encode_own(task.first_part + 1))
    assert held.digest is None


def test_who_differs_in_a_part_is_left_out_of_that_part_and_named():
    own = arithmetic_of(rule="trimmed_mean", validation="enforce")
    liar, *honest = own.agreement.peer_ids
    start, stop = own.agreement.part_bounds(0)
    common = torch.randn(stop - start, generator=torch.Generator().manual_seed(7))
    payloads = {peer_id: (common + 0.1 * number).numpy().tobytes() for number, peer_id in enumerate(honest)}
    alone = own.reduce(0, payloads)
    reduced = own.reduce(0, {**payloads, liar: (-10 * common).numpy().tobytes()})
    assert reduced.num_included == len(honest)
    assert set(reduced.odd) == {liar}
    assert reduced.odd[liar].startswith("direction: ")
    assert reduced.dropped == {}, "its other parts are looked at"
    assert bytes(reduced.payload) == bytes(alone.payload)
    assert bytes(reduced.payload) == bytes(own.reduce(0, {**payloads, liar: b"junk"}).payload)


class Contributor:
    """A member's stream: sends its parts, and takes the results."""

    def __init__(self, parts: list[tuple[int, bytes]]) -> None:
        self.parts = parts
        self.results: dict[int, bytes] = {}

    async def send(self, index: int, payload: Payload) -> None:
        self.results[index] = bytes(payload)

    async def receive(self) -> Frame | None:
        await asyncio.sleep(0)
        return Frame(self.parts[0][0], memoryview(self.parts.pop(0)[1])) if self.parts else None


def sent(member: Arithmetic, parts: range) -> Contributor:
    return Contributor([(part, bytes(member.encode_own(part))) for part in parts])


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("change", [lambda part: part[:-1], lambda part: part + bytes(1 << 20), lambda _: b""])
async def test_a_part_of_another_size_is_not_kept_and_ends_its_members_contribution(codec, change) -> None:
    members, by_id = contributions(codec)
    own_id, *_, liar, _ = peer_ids = members[0].agreement.peer_ids
    task = first_plan(members[0].agreement).tasks[0]
    options = {"decide_rule": None, "stall_timeout_s": 5.0, "deadline_s": time.monotonic() + 30.0}
    reduction = Reduction(task, peer_ids, members[0], own_id, **options)
    streams = {peer_id: sent(by_id[peer_id], reduction.parts) for peer_id in by_id if peer_id != own_id}
    last, payload = streams[liar].parts[-1]
    streams[liar].parts[-1] = (last, change(payload))
    async with asyncio.TaskGroup() as group:
        group.create_task(reduction.run())
        for peer_id, stream in streams.items():
            group.create_task(reduction.serve(peer_id, stream))
    assert set(reduction.dropped) == {liar}
    assert "bytes, not in" in reduction.dropped[liar]
    assert all(set(stream.results) == set(reduction.parts) for stream in streams.values())
    assert reduction.num_included == 5 * len(reduction.parts) - 1
