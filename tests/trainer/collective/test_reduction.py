"""What a reducer keeps of what members send it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.event_loop import on_event_loop
from tests.trainer.collective.test_arithmetic import contributions
from trainer.collective.arithmetic import Arithmetic, Payload
from trainer.collective.planning import first_plan
from trainer.collective.reduction import Reduction
from trainer.network.rpc import Frame


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
@on_event_loop
async def test_a_part_of_another_size_is_not_kept_and_ends_its_members_contribution(codec, change) -> None:
    members, by_id = contributions(codec)
    own_id, liar = members[0].agreement.peer_ids[0], members[0].agreement.peer_ids[3]
    task = first_plan(members[0].agreement).tasks[0]
    reduction = Reduction(
        task,
        members[0].agreement.peer_ids,
        members[0],
        own_id,
        consult=None,
        measured=False,
        stall_timeout_s=5.0,
        deadline_s=time.monotonic() + 30.0,
    )
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
