"""Nodes choose the state that most hold; whatever donors do, it arrives, or an error says which of them did what."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rpc_node import refused
from tests.support.state_actor import Actor, actors, peer_fields
from trainer.errors import StateTransferError
from trainer.network.discovery.announcement import Announcement
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Peer, Request
from trainer.network.rpc.stream import ServerStream
from trainer.network.transfer.descriptor import CHUNK_BYTES, Expectation
from trainer.network.transfer.donor import (
    CHUNKS_METHOD,
    DESCRIPTOR_METHOD,
    PAGE_METHOD,
    ChunksRequest,
    DescriptorRequest,
    Empty,
    PageRequest,
    StateConfig,
    StateDonor,
)
from trainer.network.transfer.fetch import ChunkPool, choose_state, fetch_descriptor, fetch_state
from trainer.network.transfer.snapshot import Snapshot, load_snapshot, snapshots_in, write_snapshot

_RPC = RpcConfig(host="127.0.0.1", heartbeat_s=0.2, stop_grace_s=0.1)
_CONFIG = StateConfig(stall_timeout_s=1.0, retry_pause_s=0.05, chunks_per_request=4)
_ANY = Expectation(max_bytes=1 << 30)


class _FlippingDonor(StateDonor):
    """Serves chunks with a bit changed."""

    async def _send_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        class Flipping:
            async def send(self, index: int, payload: bytes) -> None:
                flipped = bytearray(payload)
                flipped[len(flipped) // 2] ^= 1
                await stream.send(index, bytes(flipped))

        await super()._send_chunks(request, Flipping())


class _OtherDonor(StateDonor):
    """Serves other chunks than those requested: by default, ends each transfer after the first."""

    def _others(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        return indices[:1]

    async def _send_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        body = ChunksRequest(digest=request.body.digest, indices=self._others(request.body.indices))
        await super()._send_chunks(Request(request.sender, body), stream)


class _WrongChunkDonor(_OtherDonor):
    def _others(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((index + 1) % 12 for index in indices)


class _SilentDonor(StateDonor):
    """Accepts requests for chunks, sends heartbeats, and nothing else."""

    async def _send_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        await asyncio.sleep(3600)


@asynccontextmanager
async def _endpoints(
    folder: Path, *kinds: type[StateDonor], config: StateConfig = _CONFIG
) -> AsyncIterator[tuple[Endpoint, list[StateDonor], list[Peer]]]:
    """A fetcher's endpoint, and donors that serve ``folder``."""
    endpoints = [Endpoint(Identity.create(), "run", _RPC) for _ in range(len(kinds) + 1)]
    donors = [kind(endpoint, folder, config) for kind, endpoint in zip(kinds, endpoints[1:], strict=True)]
    try:
        for donor in donors:
            donor.start()
        for endpoint in endpoints:
            await endpoint.start()
        yield endpoints[0], donors, [endpoint.peer for endpoint in endpoints[1:]]
    finally:
        for endpoint in endpoints:
            await endpoint.stop()
        for donor in donors:
            donor.close()


@dataclass
class _State:
    """A state of 12 chunks at ``source``, to be fetched into ``target``."""

    source: Path
    target: Path
    tensors: dict[str, torch.Tensor]
    digest: str

    async def fetch(self, *kinds: type[StateDonor], **options: Any) -> Snapshot:
        async with _endpoints(self.source, *kinds) as (endpoint, _, peers):
            return await self.fetch_from(endpoint, peers, **options)

    async def fetch_from(self, endpoint: Endpoint, peers: list[Peer], **options: Any) -> Snapshot:
        arguments: dict[str, Any] = {"expectation": _ANY, "timeout_s": 30.0, "config": _CONFIG} | options
        return await fetch_state(endpoint, peers, self.digest, self.target, **arguments)

    def is_in(self, snapshot: Snapshot) -> bool:
        return snapshot.tensors.keys() == self.tensors.keys() and all(
            torch.equal(snapshot.tensors[name], self.tensors[name]) for name in self.tensors
        )


@pytest.fixture
def state(tmp_path: Path) -> _State:
    anchor, momentum = torch.randn(2, 1_500_000, generator=torch.Generator().manual_seed(0))
    tensors = {"anchor": anchor.clone(), "aaa": torch.arange(3, dtype=torch.uint8), "momentum": momentum.clone()}
    source = tmp_path / "source"
    return _State(source, tmp_path / "target", tensors, write_snapshot(source, {"outer_step": 7}, tensors).digest)


@pytest.mark.parametrize("num_donors", [1, 3])
async def test_the_state_arrives_bit_for_bit_and_all_donors_share_the_work(state: _State, num_donors: int) -> None:
    async with _endpoints(state.source, *[StateDonor] * num_donors) as (endpoint, donors, peers):
        snapshot = await state.fetch_from(endpoint, peers)
        assert all(donor.uploaded_bytes > 0 for donor in donors)
        assert sum(donor.uploaded_bytes for donor in donors) < 2 * 12_000_003
    assert state.is_in(snapshot)
    assert snapshot.meta == {"outer_step": 7}
    assert snapshots_in(state.target) == [state.digest]
    assert [path.name for path in state.target.iterdir()] == [state.digest]
    assert state.is_in(load_snapshot(state.target, state.digest))
    assert state.is_in(await state.fetch())  # Not fetched again.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_FlippingDonor, _WrongChunkDonor])
async def test_liars_are_named_and_dropped_and_the_rest_suffice(state, kind, caplog) -> None:
    with pytest.raises(StateTransferError, match=r"donor [0-9a-f]{16}… at 127\.0\.0\.1:\d+: sent .*; donor"):
        await state.fetch(kind, kind)
    assert snapshots_in(state.target) == []
    assert set((state.target / f".fetch-{state.digest}" / "data").read_bytes()) == {0}
    assert state.is_in(await state.fetch(kind, StateDonor, kind))
    assert "is asked no more: it sent" in caplog.text


@pytest.mark.parametrize("kinds", [(_OtherDonor, _OtherDonor), (_SilentDonor, StateDonor)])
async def test_donors_that_end_early_or_only_send_heartbeats_do_not_keep_the_state_away(state, kinds) -> None:
    assert state.is_in(await state.fetch(*kinds))


@pytest.mark.slow
async def test_a_silent_donor_is_dropped_and_the_time_is_kept_and_what_was_received_stays(state: _State) -> None:
    config = StateConfig(chunk_timeout_s=0.3, retry_pause_s=0.05, max_failures=2)
    with pytest.raises(StateTransferError, match=r"12 of 12 chunks .* did not send a chunk within 0\.3 s"):
        await state.fetch(_SilentDonor, config=config)
    with pytest.raises(StateTransferError, match=r"within 0\.5 s; what was received is kept"):
        await state.fetch(_SilentDonor, timeout_s=0.5)
    assert state.is_in(await state.fetch(StateDonor))


async def test_donors_without_the_state_and_unreachable_ones_are_named_and_cost_nothing_but_time(state: _State) -> None:
    missing = replace(state, digest="0" * 64)
    with pytest.raises(StateTransferError, match=r"no donor sent the descriptor .* is not here \(any more\)"):
        await missing.fetch(StateDonor, StateDonor)
    with pytest.raises(StateTransferError, match="there are no donors"):
        await missing.fetch()
    async with _endpoints(state.source, StateDonor) as (endpoint, _, peers):
        dead = Peer(Identity.create().peer_id, "127.0.0.1:9", peers[0].certificate)
        with pytest.raises(StateTransferError, match="no donor sent the descriptor"):
            await state.fetch_from(endpoint, [dead])
        donors = [dead, *peers, Peer(peers[0].peer_id, "not an address", None)]
        assert state.is_in(await state.fetch_from(endpoint, donors))


async def test_what_the_caller_does_not_expect_is_not_fetched(state: _State) -> None:
    with pytest.raises(StateTransferError, match="at most 1000 bytes"):
        await state.fetch(StateDonor, expectation=Expectation(max_bytes=1000))
    assert not (state.target / f".fetch-{state.digest}" / "data").exists()


async def test_a_state_that_is_not_finite_is_never_a_snapshot(state: _State) -> None:
    state.tensors["momentum"][-1] = float("nan")
    state.digest = write_snapshot(state.source, {}, state.tensors).digest
    for target in (state.target, state.source):  # Nor is it loaded from the own folder.
        with pytest.raises(StateTransferError, match="'momentum' holds NaN or infinities"):
            await replace(state, target=target).fetch(StateDonor)
    assert snapshots_in(state.target) == []


async def test_a_snapshot_that_was_replaced_meanwhile_is_still_served(state: _State) -> None:
    async with _endpoints(state.source, StateDonor) as (endpoint, _, peers):
        assert (await fetch_descriptor(endpoint, peers, state.digest)).digest == state.digest
        for step in range(3):
            await asyncio.to_thread(write_snapshot, state.source, {"outer_step": step}, {"x": torch.zeros(1)})
        assert state.digest not in snapshots_in(state.source)
        assert state.is_in(await state.fetch_from(endpoint, peers))


async def test_a_donor_keeps_to_its_rate_for_all_fetchers_together(state: _State) -> None:
    """One chunk may go at once, and each further one takes its time, whoever asked for it."""
    rate = 64.0 * CHUNK_BYTES
    async with _endpoints(state.source, StateDonor, config=StateConfig(max_upload_bytes_per_s=rate)) as running:
        endpoint, [donor], [peer] = running
        loop = asyncio.get_running_loop()
        begun_s = loop.time()

        async def receive(*indices: int) -> None:
            request = ChunksRequest(digest=state.digest, indices=indices)
            async with endpoint.open_stream(peer, CHUNKS_METHOD, request, timeout_s=10) as stream:
                while await stream.receive() is not None:
                    pass

        await asyncio.gather(receive(0, 1, 2, 3), receive(4, 5, 6, 7, 8, 9))
        assert donor.uploaded_bytes == 10 * CHUNK_BYTES
        assert loop.time() - begun_s >= 0.99 * 9 * CHUNK_BYTES / rate


@pytest.mark.slow
async def test_a_donor_serves_no_more_at_once_than_it_may(state: _State) -> None:
    config = StateConfig(max_uploads=1, max_upload_bytes_per_s=float(4 << 20))
    async with _endpoints(state.source, StateDonor, config=config) as (endpoint, _, [peer]):
        body = ChunksRequest(digest=state.digest, indices=(0, 1, 2))
        async with endpoint.open_stream(peer, CHUNKS_METHOD, body, timeout_s=10) as first:
            assert await first.receive() is not None
            with refused("busy", "come again later"):
                async with endpoint.open_stream(peer, CHUNKS_METHOD, body, timeout_s=10) as second:
                    await second.receive()
        # A fetcher does come again: with two requests of its own at a time here.
        assert state.is_in(await state.fetch_from(endpoint, [peer]))


async def test_a_donor_refuses_what_it_does_not_have(state: _State) -> None:
    async with _endpoints(state.source, StateDonor) as (endpoint, donors, [peer]):
        with refused("unknown_state"):
            unknown = DescriptorRequest(digest="0" * 64)
            await endpoint.call(peer, DESCRIPTOR_METHOD, unknown, Empty, timeout_s=5)
        with refused("page"):
            await endpoint.call(peer, PAGE_METHOD, PageRequest(digest=state.digest, page=1), Empty, timeout_s=5)
        with refused("chunk", "chunks below 12"):
            request = ChunksRequest(digest=state.digest, indices=(0, 12))
            async with endpoint.open_stream(peer, CHUNKS_METHOD, request, timeout_s=5) as stream:
                await stream.receive()
        assert donors[0].uploaded_bytes == 0


@pytest.mark.slow
def test_donors_that_die_or_stop_in_mid_transfer_cost_nobody_the_state(state: _State) -> None:
    async def scenario(killed: Actor, stopped: Actor, good: Actor) -> None:
        async with _endpoints(state.source) as (endpoint, _, _):
            peers = [killed.peer, stopped.peer, good.peer]
            fetching = asyncio.create_task(state.fetch_from(endpoint, peers, timeout_s=60))
            while endpoint.counters.received_bytes < 3 << 20:
                assert not fetching.done()
                await asyncio.sleep(0.01)
            killed.process.send_signal(signal.SIGKILL)
            stopped.process.send_signal(signal.SIGSTOP)
            assert state.is_in(await fetching)

    with actors(*({"directory": str(state.source), "rate": rate} for rate in (2e6, 2e6, 6e6))) as started:
        asyncio.run(scenario(*started))


def test_a_fetcher_that_is_killed_resumes_where_it_was(state: _State) -> None:
    async def scenario() -> None:
        config = StateConfig(max_upload_bytes_per_s=6e6)
        async with _endpoints(state.source, StateDonor, config=config) as (endpoint, donors, peers):
            options = {"directory": str(state.target), "digest": state.digest, "donors": list(map(peer_fields, peers))}
            await asyncio.to_thread(_kill_after, 6 << 20, options)
            assert snapshots_in(state.target) == []
            before = donors[0].uploaded_bytes
            assert state.is_in(await state.fetch_from(endpoint, peers))
            assert donors[0].uploaded_bytes - before < 9 << 20

    asyncio.run(scenario())


def _kill_after(num_bytes: int, options: dict[str, Any]) -> None:
    """Runs a fetcher until it has received so much."""
    with actors({**options, "report_bytes": num_bytes}) as [fetcher]:
        assert fetcher.read_line()["received_bytes"] >= num_bytes
        fetcher.process.send_signal(signal.SIGKILL)
        fetcher.process.wait(10)


_A, _B, _ = _DIGESTS = [letter * 64 for letter in "abc"]


def _said(node: int, step: int, digest: str) -> Announcement:
    return Announcement(
        peer_id=f"{node:064x}", node_id=str(node), run_id="r", address="h:1", outer_step=step, state_digest=digest
    )


_nodes, _steps, _any_digest = st.integers(0, 8), st.integers(0, 5), st.sampled_from(["", *_DIGESTS])
_announcements = st.lists(st.builds(_said, _nodes, _steps, _any_digest), max_size=12)
_own = st.tuples(_steps, _any_digest)
_TWO_HONEST = [_said(node, 7, _B) for node in range(2)]


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        # The most nodes win.
        ((3, _A), [_said(1, 3, _A), _said(2, 3, _A), _said(3, 9, _B)], None),
        # One liar is not believed, whatever step it claims, nor if it says it often.
        ((7, _B), [*_TWO_HONEST, _said(9, 2**50, _A)], None),
        ((0, ""), [*_TWO_HONEST, *[_said(9, 2**50, _A)] * 5], _B),
        # Ties go to the higher step, then the lower digest.
        ((0, ""), [_said(1, 3, _A), _said(2, 4, _B)], _B),
        ((0, ""), [_said(1, 3, _B), _said(2, 3, _A)], _A),
        ((3, _A), [_said(2, 3, _B)], None),
        ((3, _B), [_said(2, 3, _A)], _A),
        # Nobody has any.
        ((0, ""), [_said(1, 0, "")], None),
        ((5, _A), [], None),
    ],
)
def test_the_state_that_most_nodes_hold_is_chosen(own, others, chosen) -> None:
    assert choose_state(own, others) == chosen


@pytest.mark.slow
@given(own=_own, others=_announcements, seed=st.randoms(use_true_random=False))
def test_no_other_state_has_more_holders_and_the_order_does_not_matter(own, others, seed) -> None:
    chosen = choose_state(own, others)
    last: dict[str, str] = {}
    for said in sorted(others, key=lambda said: (said.peer_id, said.outer_step, said.state_digest)):
        last[said.peer_id] = said.state_digest
    holders = {digest: [*last.values(), own[1]].count(digest) for digest in _DIGESTS}
    assert chosen != own[1] or chosen is None
    winner = chosen if chosen is not None else own[1]
    assert (holders[winner] if winner else 0) == max(holders.values())
    seed.shuffle(others)
    assert choose_state(own, others) == chosen


@pytest.mark.slow
@given(
    st.lists(st.builds(_said, _nodes, _steps, st.sampled_from(_DIGESTS)), min_size=1, unique_by=lambda it: it.peer_id)
)
def test_nodes_that_hear_of_each_other_agree(others: list[Announcement]) -> None:
    decisions = set()
    for me in others:
        rest = [said for said in others if said.peer_id != me.peer_id]
        decisions.add(choose_state((me.outer_step, me.state_digest), rest) or me.state_digest)
    assert len(decisions) == 1


def test_an_idle_donor_takes_over_what_another_owes() -> None:
    pool = ChunkPool(range(2), max_run=16)
    assert [pool.take("slow", 1) for _ in range(3)] == [[0], [1], []]  # Not its own again.
    assert pool.take("fast", 2) == [0]
    assert [pool.take("third", 2) for _ in range(2)] == [[1], []]  # Two at a time are enough.
    assert pool.done(0) and not pool.is_missing(0) and not pool.done(0)
    pool.give_back("slow", [0, 1])
    assert pool.num_missing == 1 and pool.is_missing(1)


@given(
    num_chunks=st.integers(0, 60),
    max_run=st.integers(1, 8),
    events=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=80),
)
def test_no_chunk_is_lost_or_done_twice(num_chunks: int, max_run: int, events: list[tuple[int, int]]) -> None:
    pool = ChunkPool(range(num_chunks), max_run)
    done: list[int] = []
    for donor, num_brought in events:
        taken = pool.take(str(donor), 4)
        done += [index for index in taken[:num_brought] if pool.done(index)]
        pool.give_back(str(donor), taken)
        assert pool.num_missing == num_chunks - len(done)
    while taken := pool.take("last", 1):
        done += [index for index in taken if pool.done(index)]
    assert sorted(done) == list(range(num_chunks))
