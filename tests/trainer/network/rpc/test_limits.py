"""What peers have at once, how it is counted, and who gives way: slots, requests remembered, connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hostile_caller import NoWindow, no_window_connection
from tests.support.rpc_node import RUN_ID, Clock, Question, ask, refused, running_endpoint
from tests.support.waiting import until
from trainer.errors import RefusedError
from trainer.network.rpc import Endpoint, Identity
from trainer.network.rpc.connections import AcceptedSockets, Connection, Connections, worst_connections
from trainer.network.rpc.limits import (
    KEPT_S,
    MAX_PER_ADDRESS,
    MAX_PROVEN,
    MIN_GOOD_CALLS,
    MIN_TENURE_S,
    ByteBudget,
    ReplayGuard,
    Share,
    Slot,
    Slots,
    Standing,
)
from trainer.network.rpc.token_buckets import TokenBuckets

PROVEN_A, PROVEN_B = Share("a", True), Share("b", True)


@dataclass
class _Calls:
    """Calls that take slots, and what became of them."""

    slots: Slots
    shed: list[str] = field(default_factory=list)

    def take(self, name: str, share: Share, *, holder: str = "", stalled_s: float | None = None) -> Slot:
        now_s = asyncio.get_running_loop().time()
        since = None if stalled_s is None else now_s - stalled_s
        return self.slots.take(Slot(share, holder or name, lambda: since, lambda: self.shed.append(name), keep_s=0.25))

    def is_busy(self, share: Share, holder: str = "newcomer") -> bool:
        try:
            self.take("newcomer", share, holder=holder)
        except RefusedError as error:
            assert error.reason == "busy"
            return True
        return False


def _calls(*, total: int = 8, holder: int = 2, address: int = 4) -> _Calls:
    return _Calls(Slots("calls", total, holder, address))


def _stranger(address: str) -> Share:
    return Share(address, False)


async def test_slots_are_bounded_per_holder_and_in_all_and_come_back() -> None:
    calls = _calls(total=3)
    held = [calls.take("1", PROVEN_A, holder="a", stalled_s=0.1), calls.take("2", PROVEN_A, holder="a")]
    assert calls.is_busy(PROVEN_A, "a")
    held.append(calls.take("3", PROVEN_B, holder="b"))
    assert calls.is_busy(PROVEN_B, "b")
    for slot in [*held, *held]:
        calls.slots.give(slot)
        calls.slots.shed(slot)  # Without effect: it was given back.
    assert len(calls.slots) == 0 and not calls.shed
    assert not calls.slots.stalled(asyncio.get_running_loop().time())
    assert not calls.is_busy(PROVEN_A, "a")


async def test_strangers_share_what_their_address_may_take_and_leave_a_quarter_to_proven_peers() -> None:
    calls = _calls()
    for name in "wxyz":
        calls.take(name, _stranger("192.0.2.1"))
    assert calls.is_busy(_stranger("192.0.2.1"))
    for number in (2, 3):
        calls.take(str(number), _stranger(f"192.0.2.{number}"))
    assert calls.is_busy(_stranger("192.0.2.100"))
    for name in ("a", "b"):
        calls.take(name, Share(name, True))
    assert calls.is_busy(Share("c", True))
    assert not calls.shed


async def test_a_newcomer_gets_the_place_of_what_has_stalled_for_longest() -> None:
    calls = _calls()
    for name, stalled_s in (("moves", None), ("just now", 0.1), ("long", 5.0), ("longest", 9.0)):
        calls.take(name, _stranger("192.0.2.1"), stalled_s=stalled_s)
    calls.take("elsewhere", _stranger("192.0.2.2"), stalled_s=100.0)
    for expected in (["longest"], ["longest", "long"]):
        calls.take(f"after {expected[-1]}", _stranger("192.0.2.1"))
        assert calls.shed == expected
    assert calls.is_busy(_stranger("192.0.2.1")), "what moves, or was about to, is not ended"


async def test_when_all_is_full_the_address_that_holds_most_gives_way_and_proven_peers_last() -> None:
    calls = _calls(total=8, address=3)
    for name in ("a", "b"):
        calls.take(name, Share(name, True), stalled_s=50.0)
    calls.take("single", _stranger("192.0.2.9"), stalled_s=40.0)
    for number in range(3):
        calls.take(f"many {number}", _stranger("192.0.2.1"), stalled_s=1.0 + number)
    for name in "cde":
        calls.take(name, Share(name, True))
    assert calls.shed == ["many 2"]
    for name in "fghi":
        calls.take(name, Share(name, True))
    assert calls.shed[1:] == ["many 1", "single", "many 0", "a"]


def test_a_budget_is_bounded_per_share_and_in_all_and_strangers_do_not_use_it_up() -> None:
    budget = ByteBudget(100, 60)
    budget.take(PROVEN_A, 50)
    assert not budget.has_room(PROVEN_A, 11)
    assert budget.has_room(PROVEN_B, 50)
    budget.take(PROVEN_B, 45)
    assert not budget.has_room(PROVEN_A, 6)
    budget.give(PROVEN_A, 50)
    assert budget.has_room(PROVEN_A, 55)
    assert budget.total_bytes == 45
    budget = ByteBudget(100, 40)
    for number in range(2):
        budget.take(_stranger(f"192.0.2.{number}"), 40)
        assert not budget.has_room(_stranger("192.0.2.0"), 1)
        assert budget.has_room(PROVEN_A, 20)


_LIMITS = {"max_calls": 8, "max_calls_per_peer": 2, "max_streams": 8, "max_streams_per_peer": 2}


async def _held(
    stack: AsyncExitStack, victim: Endpoint, num_connections: int, *, kind: str = "request", tls: bool = False
) -> list[NoWindow]:
    """Connections with a call each, of which no answer can be sent; each under an identity of its own."""
    method, payload = ("test/echo", b"x" * 1000) if kind == "request" else ("test/pour", b"")
    connections = []
    for _ in range(num_connections):
        connection = await stack.enter_async_context(no_window_connection(victim.peer, RUN_ID, tls=tls))
        connection.call(method, {}, identity=Identity.create(), kind=kind, payload=payload)
        connections.append(connection)
    return connections


@pytest.mark.parametrize("tls", [False, True])
async def test_a_call_whose_answer_nobody_takes_ends_with_its_connection(tls: bool) -> None:
    async with running_endpoint(tls=tls) as victim, AsyncExitStack() as stack:
        [connection] = await _held(stack, victim, 1, tls=tls)
        calls = victim._serving.calls
        await until(lambda: len(calls) == 1)
        await until(lambda: not len(calls))
        await until(lambda: connection.is_closed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["request", "open"])
async def test_a_newcomer_gets_the_place_of_what_stands_still(kind: str) -> None:
    """Also from the same address, and long before the stall time-out."""
    async with (
        running_endpoint(stall_timeout_s=60.0, **_LIMITS) as victim,
        running_endpoint() as newcomer,
        AsyncExitStack() as stack,
    ):
        connections = await _held(stack, victim, 4, kind=kind)
        slots = victim._serving.calls if kind == "request" else victim._serving.streams
        await until(lambda: len(slots.stalled(asyncio.get_running_loop().time() - 0.3)) == 4)
        assert not victim.counters.refused
        if kind == "request":
            await ask(newcomer, victim.peer, "in")
        else:
            async with newcomer.open_stream(victim.peer, "test/mirror", Question(), timeout_s=20) as stream:
                await stream.end()
                assert await stream.receive() is None
        # One had to give way, and half of all slots is what they could have at most.
        await until(lambda: sum(connection.is_closed for connection in connections) == 1)
        await until(lambda: len(slots) == 3)


async def test_a_peer_that_has_answered_has_slots_of_its_own() -> None:
    """Calls in good order fill a peer's and the address's share: a newcomer is told so, a proven peer is not."""
    async with running_endpoint(**_LIMITS) as victim, running_endpoint() as proven, running_endpoint() as newcomer:
        await ask(victim, proven.peer)
        async with running_endpoint() as first, running_endpoint() as second, asyncio.TaskGroup() as tasks:
            long_ones = [
                tasks.create_task(ask(caller, victim.peer, sleep_s=60, timeout_s=90))
                for caller in (first, first, second, second)
            ]
            await until(lambda: len(victim._serving.calls) == 4)
            for caller in (newcomer, first):  # The one for its address, the other for itself.
                with refused("busy", "2 calls of one peer, 4 of one address and 8 of all"):
                    await ask(caller, victim.peer)
            await ask(proven, victim.peer)
            for task in long_ones:
                task.cancel()


@pytest.mark.slow
async def test_a_proven_peer_that_takes_no_answer_loses_its_own_slots() -> None:
    async with running_endpoint() as victim, AsyncExitStack() as stack:
        standing = victim._serving.standing
        connection = await stack.enter_async_context(no_window_connection(victim.peer, RUN_ID))
        identity = Identity.create()
        standing.prove(identity.peer_id, "127.0.0.1")
        connection.call("test/echo", {}, identity=identity)
        await until(lambda: not standing.is_proven(identity.peer_id))


@pytest.mark.slow
async def test_a_greylisted_address_has_one_call_of_a_connection_served_at_a_time() -> None:
    """What 32 calls of one connection cost is what one does, and a newcomer of the same address gets in at once."""
    async with running_endpoint() as victim, running_endpoint() as newcomer, AsyncExitStack() as stack:
        serving = victim._serving
        for _ in range(4):
            serving.standing.let_stall("127.0.0.1")
        connections = [await stack.enter_async_context(no_window_connection(victim.peer, RUN_ID)) for _ in range(2)]
        for connection in connections:
            for _ in range(32):
                connection.call("test/echo", {}, identity=Identity.create())
        await until(lambda: len(serving.greylisted) == 62 and len(serving.calls) == 2)
        await ask(newcomer, victim.peer, "in")
        assert not victim.counters.refused
        await until(lambda: all(connection.is_closed for connection in connections))
        await until(lambda: not len(serving.greylisted) and not len(serving.calls) and not len(serving.waiting))
        # Calls in good order end one after the other, each in its turn.
        await asyncio.gather(*(ask(newcomer, victim.peer, text) for text in "abc"))


_WINDOW_S = 100.0
_START = Clock.now_s


def _guard(clock: Callable[[], float], *, total: int = 1000, per_peer: int = 1000) -> ReplayGuard:
    return ReplayGuard(window_s=_WINDOW_S, max_entries=total, max_entries_per_peer=per_peer, now=clock)


def _take(guard: ReplayGuard, sender: str, nonce: int, sent_at: float, address: str = "") -> str:
    """``address``: of a sender that is not proven."""
    try:
        guard.check_clock(sent_at)
        share = Share(address, False) if address else Share(sender, True)
        guard.remember(sender, nonce.to_bytes(16, "big"), sent_at, share)
    except RefusedError as error:
        return error.reason
    return "taken"


def test_a_second_time_and_a_wrong_clock_are_refused_but_not_another_sender() -> None:
    guard = _guard(Clock())
    assert [_take(guard, sender, 1, _START) for sender in ("a", "a", "b", "b")] == ["taken", "replayed"] * 2
    # One nonce with another time is still one request.
    assert [_take(guard, "a", 2, _START + offset_s) for offset_s in (-90, 90)] == ["taken", "replayed"]
    for offset_s, how_much in ((-130.0, "130.0 s behind"), (101.5, "101.5 s ahead")):
        with refused("clock", how_much):
            guard.check_clock(_START + offset_s)


def test_when_full_the_new_are_refused_and_the_old_stay_known() -> None:
    clock = Clock()
    guard = _guard(clock, per_peer=3)
    assert [_take(guard, "a", nonce, _START) for nonce in range(4)] == ["taken"] * 3 + ["rate"]
    assert [_take(guard, "a", nonce, _START) for nonce in range(3)] == ["replayed"] * 3
    assert _take(guard, "b", 0, _START) == "taken"
    clock.now_s += 2.2 * _WINDOW_S
    assert _take(guard, "a", 9, clock.now_s) == "taken"
    assert len(guard) == 1
    clock.now_s = _START  # A clock that is set back reopens nothing.
    assert _take(guard, "a", 0, _START) == "clock"
    guard = _guard(clock, total=50)
    taken = [_take(guard, str(sender), 0, clock.now_s) for sender in range(1000)]
    assert taken == ["taken"] * 50 + ["rate"] * 950 and len(guard) == 50


def test_one_address_cannot_use_up_what_is_remembered_for_all() -> None:
    """However many senders it pretends to be and whatever clock; and it gets on again within seconds all the time."""
    clock = Clock()
    guard = _guard(clock, total=4000)
    taken = 0
    for second in range(600):
        clock.now_s += 1.0
        flood = [_take(guard, f"{second}.{it}", it, clock.now_s + 90, "198.51.100.7") for it in range(30)]
        taken += flood.count("taken")
        assert set(flood) <= {"taken", "rate"}
        assert flood.count("taken") >= 3
        assert len(guard) <= 1000
    assert taken < 30 * 600 / 4
    assert _take(guard, "of another host", 0, clock.now_s, "192.0.2.1") == "taken"
    assert _take(guard, "proven", 0, clock.now_s) == "taken"
    guard = _guard(clock, total=400)
    taken = [_take(guard, f"{it}", 0, clock.now_s, f"192.0.2.{it}") for it in range(400)]
    assert taken == ["taken"] * 300 + ["rate"] * 100  # Many addresses leave a quarter to proven senders.
    assert [_take(guard, "proven", nonce, clock.now_s) for nonce in range(101)] == ["taken"] * 100 + ["rate"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.floats(-150, 150), st.floats(-60, 120)), max_size=60)
)
def test_no_message_is_ever_taken_twice(events: list[tuple[int, int, float, float]]) -> None:
    """Whatever is sent again, at whatever times, under a clock that jumps both ways."""
    clock = Clock()
    guard = _guard(clock, per_peer=8, total=20)
    seen: list[tuple[str, int, float]] = []
    for sender, nonce, offset_s, jump_s in events:
        clock.now_s += jump_s
        message = (str(sender), nonce, clock.now_s + offset_s)
        for candidate in [message, *seen]:
            if _take(guard, *candidate) == "taken":
                assert candidate not in seen
                seen.append(candidate)
        assert len(guard) <= 20


@given(
    st.floats(1.0, 50.0),
    st.floats(0.1, 100.0),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.sampled_from("abc")), max_size=200),
)
def test_no_key_takes_more_than_its_bucket_and_the_time_give(
    capacity: float, per_s: float, steps: list[tuple[float, str]]
) -> None:
    now_s = 0.0
    buckets = TokenBuckets(capacity, per_s, lambda: now_s)
    taken = dict.fromkeys("abc", 0)
    for pause_s, key in steps:
        now_s += pause_s
        has, wait_s = buckets.left(key) >= 1.0, buckets.wait_s(key)
        assert has == (wait_s == 0.0) == buckets.take(key)
        taken[key] += has
    assert all(count <= capacity + per_s * now_s + 1e-6 for count in taken.values())


def test_a_token_given_back_can_be_taken_again_and_full_buckets_are_not_remembered() -> None:
    clock = Clock()
    buckets = TokenBuckets(2.0, 0.5, clock)
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    assert buckets.wait_s("a") == 2.0
    for _ in range(5):
        buckets.give_back("a")
        buckets.give_back("never taken from")
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    for number in range(50_000):
        clock.now_s += 0.01
        buckets.take(str(number))
    assert len(buckets) <= 8192


def test_an_address_has_so_many_proven_peers_and_the_first_stay() -> None:
    clock = Clock()
    standing = Standing(clock)
    for number in range(2 * MAX_PER_ADDRESS):
        clock.now_s += 1.0
        standing.prove("first", "192.0.2.1")
        standing.prove(str(number), "192.0.2.1")
    assert len(standing) == MAX_PER_ADDRESS
    assert standing.is_proven("first")
    standing.prove("elsewhere", "192.0.2.2")
    assert standing.share("elsewhere", "192.0.2.2") == Share("elsewhere", True)
    for _ in range(2):
        standing.disprove("elsewhere")
    assert standing.share("elsewhere", "192.0.2.2") == Share("192.0.2.2", False)
    clock.now_s += KEPT_S - 10.0
    standing.prove("first", "192.0.2.1")
    clock.now_s += 11.0
    standing.prove("later", "192.0.2.1")
    assert standing.is_proven("first") and standing.is_proven("later")
    assert len(standing) == 2


def test_proven_and_greylisted_ones_are_bounded_in_all() -> None:
    standing = Standing(Clock())
    for number in range(MAX_PROVEN + 10):
        standing.prove(str(number), f"192.0.{number // 50}.{number % 50}")
    assert len(standing) == MAX_PROVEN
    for number in range(20_000):
        standing.let_stall(f"192.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(standing._stalls) <= 4096


def test_an_address_is_greylisted_for_a_minute_after_its_strangers_let_answers_stall() -> None:
    clock = Clock()
    standing = Standing(clock)
    for _ in range(3):
        standing.let_stall("192.0.2.1")
    assert not standing.is_greylisted("192.0.2.1")
    clock.now_s += 61.0
    standing.let_stall("192.0.2.1")
    assert not standing.is_greylisted("192.0.2.1")  # Those before are forgotten.
    for _ in range(3):
        standing.let_stall("192.0.2.1")
    assert standing.is_greylisted("192.0.2.1") and not standing.is_greylisted("192.0.2.2")
    clock.now_s += 60.0
    assert not standing.is_greylisted("192.0.2.1")


def _connection(number: int, address: str = "192.0.2.1", **options: object) -> Connection:
    return Connection(f"ipv4:{address}:{number}", address, float(number), **options)  # type: ignore[arg-type]


def _closed(connections: list[Connection], max_total: int) -> list[str]:
    worst = worst_connections(connections, lambda it: it.peer_id.startswith("proven"), max_total)
    return [connection.grpc_peer for connection in worst]


def test_an_address_keeps_its_share_and_the_longest_idle_go_first() -> None:
    connections = [_connection(number) for number in range(30)]
    connections[0].peer_id = "known"
    connections[1].num_calls = 1
    connections += [_connection(number, "192.0.2.2") for number in range(20)]
    assert _closed(connections, 80) == [f"ipv4:192.0.2.1:{number}" for number in range(2, 12)]


def test_near_the_limit_the_address_with_most_gives_way_and_proven_peers_keep_theirs_but_not_any_number() -> None:
    connections = [_connection(number, f"192.0.2.{number}") for number in range(40)]
    connections += [_connection(100 + number, "198.51.100.7") for number in range(20)]
    assert _closed(connections, 80) == []
    connections += [_connection(200 + number, f"203.0.113.{number}") for number in range(10)]
    assert _closed(connections, 80) == [f"ipv4:198.51.100.7:{100 + number}" for number in range(10)]
    connections = [_connection(number, peer_id=f"proven {number}") for number in range(60)]
    assert _closed(connections, 64) == []
    connections = [_connection(number, peer_id="proven") for number in range(60)]
    assert _closed(connections, 64) == [f"ipv4:192.0.2.1:{number}" for number in range(36)]


def test_a_peer_is_proven_by_calls_in_good_order_for_a_while_on_one_connection() -> None:
    clock = Clock()
    standing = Standing(clock)
    connections = Connections(16, standing, clock)

    def call(peer_id: str) -> None:
        with connections.in_use("ipv4:192.0.2.1:5") as connection:
            connections.identified(connection, peer_id)
            connections.ended_well(connection, peer_id)

    for _ in range(3 * MIN_GOOD_CALLS):
        call("quick")
    assert not standing.is_proven("quick")
    clock.now_s += MIN_TENURE_S + 1
    call("other")
    call("quick")
    assert not len(standing), "another's call in between begins it anew"
    for _ in range(MIN_GOOD_CALLS):
        clock.now_s += MIN_TENURE_S / 4
        call("steady")
    assert standing.is_proven("steady")
    assert len(standing) == 1


@pytest.mark.skipif(not AcceptedSockets.are_visible(), reason="no /proc/self/fd here")
async def test_a_guard_sees_and_shuts_accepted_connections_only() -> None:
    async with running_endpoint() as endpoint, running_endpoint() as other:
        await ask(other, endpoint.peer)
        sockets = AcceptedSockets(int(endpoint.address.rpartition(":")[2]))
        [peer] = sockets.scan()
        assert peer.startswith("ipv4:127.0.0.1:")
        assert not AcceptedSockets(int(other.address.rpartition(":")[2])).scan()
        assert not sockets.shut("ipv4:127.0.0.1:1")
        assert sockets.shut(peer)
        await until(lambda: not sockets.scan())
        await ask(other, endpoint.peer)
