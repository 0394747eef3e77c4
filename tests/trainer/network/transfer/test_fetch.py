"""Whatever donors do, the state that was asked for comes, or a StateTransferError that says who did what."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from tests.support.state_actor import Actor, actors, spell_peers
from trainer.errors import PeerUnavailableError, RefusedError, StateTransferError
from trainer.network.rpc.config import RpcConfig
from trainer.network.rpc.endpoint import Endpoint
from trainer.network.rpc.identity import Identity
from trainer.network.rpc.messages import Peer, Request
from trainer.network.rpc.stream import ServerStream
from trainer.network.transfer.config import StateConfig
from trainer.network.transfer.descriptor import Expectation
from trainer.network.transfer.donor import StateDonor
from trainer.network.transfer.donor_messages import (
    CHUNKS_METHOD,
    DESCRIPTOR_METHOD,
    PAGE_METHOD,
    ChunksRequest,
    DescriptorRequest,
    Empty,
    PageRequest,
)
from trainer.network.transfer.fetch import fetch_descriptor, fetch_state
from trainer.network.transfer.layout import snapshots_in
from trainer.network.transfer.snapshot import Snapshot, load_snapshot, write_snapshot

_RPC = RpcConfig(host="127.0.0.1", heartbeat_s=0.2, stop_grace_s=0.1)
_CONFIG = StateConfig(stall_timeout_s=1.0, retry_pause_s=0.05, chunks_per_request=4)
_ANY = Expectation(max_bytes=1 << 30)

Make = Callable[..., dict[str, torch.Tensor]]


class _FlippingDonor(StateDonor):
    """Serves one chunk with a bit changed."""

    async def _give_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        class Flipping:
            async def send(self, index: int, payload: bytes) -> None:
                flipped = bytearray(payload)
                flipped[len(flipped) // 2] ^= 1
                await stream.send(index, bytes(flipped))

        await super()._give_chunks(request, Flipping())  # type: ignore[arg-type]


class _WrongChunkDonor(StateDonor):
    """Serves other chunks than those asked for."""

    async def _give_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        indices = tuple((index + 1) % 12 for index in request.body.indices)
        await super()._give_chunks(
            Request(request.sender, ChunksRequest(digest=request.body.digest, indices=indices)), stream
        )


class _SilentDonor(StateDonor):
    """Takes requests for chunks, shows signs of life, and sends nothing."""

    async def _give_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        await asyncio.sleep(3600)


class _LeavingDonor(StateDonor):
    """Ends each transfer after its first chunk."""

    async def _give_chunks(self, request: Request[ChunksRequest], stream: ServerStream) -> None:
        first = ChunksRequest(digest=request.body.digest, indices=request.body.indices[:1])
        await super()._give_chunks(Request(request.sender, first), stream)


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


def _same(snapshot: Snapshot, tensors: dict[str, torch.Tensor]) -> bool:
    return snapshot.tensors.keys() == tensors.keys() and all(
        torch.equal(snapshot.tensors[name], tensors[name]) for name in tensors
    )


def _fetch(
    source: Path, target: Path, digest: str, *kinds: type[StateDonor], config: StateConfig = _CONFIG, **options: object
) -> Snapshot:
    async def scenario() -> Snapshot:
        async with _endpoints(source, *kinds) as (endpoint, _, peers):
            arguments: dict[str, object] = {"expectation": _ANY, "timeout_s": 30.0, "config": config}
            return await fetch_state(endpoint, peers, digest, target, **(arguments | options))  # type: ignore[arg-type]

    return asyncio.run(scenario())


@pytest.fixture
def tensors(make_tensors: Make) -> dict[str, torch.Tensor]:
    return make_tensors(1_500_000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def digest(source: Path, tensors: dict[str, torch.Tensor]) -> str:
    return write_snapshot(source, {"outer_step": 7}, tensors).digest


@pytest.mark.parametrize("num_donors", [1, 3])
def test_the_state_comes_bit_for_bit(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor], num_donors: int
) -> None:
    snapshot = _fetch(source, target, digest, *[StateDonor] * num_donors)
    assert _same(snapshot, tensors)
    assert snapshot.meta == {"outer_step": 7}
    assert snapshots_in(target) == [digest]
    assert [path.name for path in target.iterdir()] == [digest]
    assert _same(load_snapshot(target, digest), tensors)


def test_several_donors_share_the_work(source: Path, target: Path, digest: str) -> None:
    async def scenario() -> None:
        async with _endpoints(source, *[StateDonor] * 3) as (endpoint, donors, peers):
            await fetch_state(endpoint, peers, digest, target, expectation=_ANY, timeout_s=30, config=_CONFIG)
            assert all(donor.uploaded_bytes > 0 for donor in donors)
            assert sum(donor.uploaded_bytes for donor in donors) < 2 * 12_000_003

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_FlippingDonor, _WrongChunkDonor])
def test_a_liar_is_dropped_and_the_rest_suffice(
    source: Path,
    target: Path,
    digest: str,
    tensors: dict[str, torch.Tensor],
    kind: type[StateDonor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert _same(_fetch(source, target, digest, kind, StateDonor, kind), tensors)
    assert "is asked no more: it sent" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_FlippingDonor, _WrongChunkDonor])
def test_liars_alone_are_named_and_nothing_of_theirs_is_kept(
    source: Path, target: Path, digest: str, kind: type[StateDonor]
) -> None:
    with pytest.raises(StateTransferError, match=r"donor [0-9a-f]{16}… at 127\.0\.0\.1:\d+: sent .*; donor"):
        _fetch(source, target, digest, kind, kind)
    assert snapshots_in(target) == []
    assert set((target / f".fetch-{digest}" / "data").read_bytes()) == {0}


def test_a_donor_that_leaves_early_is_given_what_it_can_do(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    assert _same(_fetch(source, target, digest, _LeavingDonor, _LeavingDonor), tensors)


def test_a_donor_that_only_shows_signs_of_life_does_not_hold_others_up(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    assert _same(_fetch(source, target, digest, _SilentDonor, StateDonor), tensors)


def test_a_donor_that_only_shows_signs_of_life_is_given_up(source: Path, target: Path, digest: str) -> None:
    config = StateConfig(chunk_timeout_s=0.3, retry_pause_s=0.05, max_failures=2)
    with pytest.raises(StateTransferError, match=r"12 of 12 chunks .* did not send a chunk within 0\.3 s"):
        _fetch(source, target, digest, _SilentDonor, config=config)


@pytest.mark.slow
def test_the_time_is_kept_and_what_came_stays(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(StateTransferError, match=r"within 0\.5 s; what has come is kept"):
        _fetch(source, target, digest, _SilentDonor, timeout_s=0.5)
    assert _same(_fetch(source, target, digest, StateDonor), tensors)


def test_donors_that_do_not_have_it_are_named(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(StateTransferError, match=r"nobody gave the descriptor .* is not here \(any more\)"):
        _fetch(source, target, "0" * 64, StateDonor, StateDonor)
    with pytest.raises(StateTransferError, match="there are no donors"):
        _fetch(source, target, "0" * 64)


def test_a_dead_address_among_donors_costs_nothing_but_time(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    async def scenario() -> Snapshot:
        async with _endpoints(source, StateDonor) as (endpoint, _, peers):
            dead = Peer(Identity.create().peer_id, "127.0.0.1:9", peers[0].certificate)
            donors = [dead, *peers, Peer(peers[0].peer_id, "not an address", None)]
            return await fetch_state(endpoint, donors, digest, target, expectation=_ANY, timeout_s=30, config=_CONFIG)

    assert _same(asyncio.run(scenario()), tensors)


def test_what_is_here_is_not_fetched_again(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    _fetch(source, target, digest, StateDonor)
    assert _same(_fetch(source, target, digest), tensors)


def test_what_the_caller_does_not_expect_is_not_fetched(source: Path, target: Path, digest: str) -> None:
    with pytest.raises(StateTransferError, match="at most 1000 bytes"):
        _fetch(source, target, digest, StateDonor, expectation=Expectation(max_bytes=1000))
    other = {"anchor": ("float32", (5,))}
    with pytest.raises(StateTransferError, match="another architecture"):
        _fetch(source, target, digest, StateDonor, expectation=Expectation(max_bytes=1 << 30, tensors=other))
    assert not (target / f".fetch-{digest}" / "data").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_never_a_snapshot(
    source: Path, target: Path, tensors: dict[str, torch.Tensor], bad: float
) -> None:
    tensors["momentum"][-1] = bad
    digest = write_snapshot(source, {}, tensors).digest
    with pytest.raises(StateTransferError, match="'momentum' holds NaN or infinities"):
        _fetch(source, target, digest, StateDonor)
    assert snapshots_in(target) == []
    with pytest.raises(StateTransferError, match="'momentum' holds NaN or infinities"):
        _fetch(source, source, digest, StateDonor)  # Nor taken from the own folder.


def test_a_full_disk_is_a_clear_error(source: Path, target: Path, digest: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        with pytest.raises(StateTransferError, match=r"does not fit into .*make room"):
            _fetch(source, target, digest, StateDonor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_snapshot_that_was_replaced_meanwhile_is_still_given(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    async def scenario() -> Snapshot:
        async with _endpoints(source, StateDonor) as (endpoint, _, peers):
            descriptor = await fetch_descriptor(endpoint, peers, digest)
            assert descriptor.digest == digest
            for step in range(3):
                await asyncio.to_thread(write_snapshot, source, {"outer_step": step}, {"x": torch.zeros(1)})
            assert digest not in snapshots_in(source)
            return await fetch_state(endpoint, peers, digest, target, expectation=_ANY, timeout_s=30, config=_CONFIG)

    assert _same(asyncio.run(scenario()), tensors)


@pytest.mark.slow
def test_a_donor_serves_no_more_at_once_than_it_may(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    async def scenario() -> None:
        config = StateConfig(max_uploads=1, max_upload_bytes_per_s=float(4 << 20))
        async with _endpoints(source, StateDonor, config=config) as (endpoint, _, [peer]):
            body = ChunksRequest(digest=digest, indices=(0, 1, 2))
            async with endpoint.open_stream(peer, CHUNKS_METHOD, body, timeout_s=10) as first:
                assert await first.receive() is not None
                with pytest.raises(RefusedError, match="come again later"):
                    async with endpoint.open_stream(peer, CHUNKS_METHOD, body, timeout_s=10) as second:
                        await second.receive()
            # A fetcher does come again: with two requests of its own at a time here.
            snapshot = await fetch_state(
                endpoint, [peer], digest, target, expectation=_ANY, timeout_s=30, config=_CONFIG
            )
            assert _same(snapshot, tensors)

    asyncio.run(scenario())


def test_a_donor_refuses_what_it_does_not_have(source: Path, digest: str) -> None:
    async def scenario() -> None:
        async with _endpoints(source, StateDonor) as (endpoint, donors, [peer]):
            for method, body, reason in (
                (DESCRIPTOR_METHOD, DescriptorRequest(digest="0" * 64), "unknown_state"),
                (PAGE_METHOD, PageRequest(digest=digest, page=1), "page"),
            ):
                with pytest.raises(RefusedError) as caught:
                    await endpoint.call(peer, method, body, Empty, timeout_s=5)
                assert caught.value.reason == reason
            with pytest.raises(RefusedError, match="chunks below 12"):
                request = ChunksRequest(digest=digest, indices=(0, 12))
                async with endpoint.open_stream(peer, CHUNKS_METHOD, request, timeout_s=5) as stream:
                    await stream.receive()
            assert donors[0].uploaded_bytes == 0

    asyncio.run(scenario())


@pytest.mark.slow
def test_donors_that_die_or_stop_in_mid_transfer_cost_nobody_the_state(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    async def scenario(killed: Actor, stopped: Actor, good: Actor) -> Snapshot:
        endpoint = Endpoint(Identity.create(), "run", _RPC)
        await endpoint.start()
        peers = [killed.peer, stopped.peer, good.peer]
        try:
            fetching = asyncio.create_task(
                fetch_state(endpoint, peers, digest, target, expectation=_ANY, timeout_s=60, config=_CONFIG)
            )
            while endpoint.counters.received_bytes < 3 << 20:
                await asyncio.sleep(0.01)
            killed.process.send_signal(signal.SIGKILL)
            stopped.process.send_signal(signal.SIGSTOP)
            return await fetching
        finally:
            await endpoint.stop()

    with actors(
        ("donor", str(source), "--rate", "2e6"),
        ("donor", str(source), "--rate", "2e6"),
        ("donor", str(source), "--rate", "6e6"),
    ) as donors:
        snapshot = asyncio.run(scenario(*donors))
    assert _same(snapshot, tensors)


def test_a_fetcher_that_is_killed_goes_on_where_it_was(
    source: Path, target: Path, digest: str, tensors: dict[str, torch.Tensor]
) -> None:
    async def scenario(fetcher: Callable[[list[Peer]], tuple[str, ...]]) -> None:
        async with _endpoints(source, StateDonor, config=StateConfig(max_upload_bytes_per_s=6e6)) as (_, donors, peers):
            await asyncio.to_thread(_kill_after, 6 << 20, fetcher(peers))
            assert snapshots_in(target) == []
            before = donors[0].uploaded_bytes
            fresh = Endpoint(Identity.create(), "run", _RPC)
            await fresh.start()
            try:
                snapshot = await fetch_state(
                    fresh, peers, digest, target, expectation=_ANY, timeout_s=30, config=_CONFIG
                )
            finally:
                await fresh.stop()
            assert _same(snapshot, tensors)
            assert donors[0].uploaded_bytes - before < 9 << 20

    asyncio.run(scenario(lambda peers: ("fetch", str(target), "--digest", digest, "--donors", spell_peers(peers))))


def _kill_after(num_bytes: int, arguments: tuple[str, ...]) -> None:
    """Runs a fetcher until it has received so much."""
    with actors((*arguments, "--report-bytes", str(num_bytes))) as [fetcher]:
        assert int(str(fetcher.read_line()["received_bytes"])) >= num_bytes
        fetcher.process.send_signal(signal.SIGKILL)
        fetcher.process.wait(10)


def test_a_donor_that_is_unreachable_is_said_to_be(source: Path, target: Path, digest: str) -> None:
    async def scenario() -> None:
        async with _endpoints(source) as (endpoint, _, _):
            with pytest.raises((StateTransferError, PeerUnavailableError), match="nobody gave the descriptor"):
                dead = Peer(Identity.create().peer_id, "127.0.0.1:9", None)
                await fetch_state(endpoint, [dead], digest, target, expectation=_ANY, timeout_s=30, config=_CONFIG)

    asyncio.run(scenario())
