"""Who has a share of its own."""

from __future__ import annotations

from trainer.network.rpc.standing import KEPT_S, MAX_PER_ADDRESS, MAX_PROVEN, Share, Standing


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_strangers_share_their_address_and_proven_peers_do_not() -> None:
    standing = Standing(_Clock())
    standing.prove("good", "192.0.2.1")
    assert standing.share("good", "192.0.2.1") == Share("good", True)
    assert standing.share("other", "192.0.2.1") == Share("192.0.2.1", False)
    standing.disprove("good")
    standing.disprove("good")
    assert standing.share("good", "192.0.2.1") == Share("192.0.2.1", False)


def test_an_address_has_so_many_proven_peers_and_the_first_stay() -> None:
    clock = _Clock()
    standing = Standing(clock)
    for number in range(2 * MAX_PER_ADDRESS):
        clock.now_s += 1.0
        standing.prove("first", "192.0.2.1")
        standing.prove(str(number), "192.0.2.1")
    assert len(standing) == MAX_PER_ADDRESS
    assert standing.is_proven("first")
    standing.prove("elsewhere", "192.0.2.2")
    assert standing.is_proven("elsewhere")
    clock.now_s += KEPT_S - 10.0
    standing.prove("first", "192.0.2.1")
    clock.now_s += 11.0
    standing.prove("later", "192.0.2.1")
    assert standing.is_proven("first") and standing.is_proven("later")
    assert len(standing) == 2


def test_they_are_bounded_in_all() -> None:
    standing = Standing(_Clock())
    for number in range(MAX_PROVEN + 10):
        standing.prove(str(number), f"192.0.{number // 50}.{number % 50}")
    assert len(standing) == MAX_PROVEN


def test_an_address_is_greylisted_for_a_minute_after_its_strangers_let_answers_stall() -> None:
    clock = _Clock()
    standing = Standing(clock)
    for _ in range(3):
        standing.let_stall("192.0.2.1")
    assert not standing.is_greylisted("192.0.2.1")
    clock.now_s = 61.0
    standing.let_stall("192.0.2.1")
    assert not standing.is_greylisted("192.0.2.1")  # Those before are forgotten.
    for _ in range(3):
        standing.let_stall("192.0.2.1")
    assert standing.is_greylisted("192.0.2.1") and not standing.is_greylisted("192.0.2.2")
    clock.now_s += 60.0
    assert not standing.is_greylisted("192.0.2.1")


def test_the_greylist_is_bounded() -> None:
    standing = Standing(_Clock())
    for number in range(20_000):
        standing.let_stall(f"192.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(standing._stalls) <= 4096
