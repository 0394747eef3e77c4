"""When stages step: at their target, together, following who is ahead, and never with samples that are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stage_worker import TAIL_INPUT, RunningWorker, WorkerSetup, running_driver, running_worker, weights
from tests.support.waiting import until
from trainer.network.rpc import Identity, Peer
from trainer.outer.engine.collective import RoundReport
from trainer.outer.engine.strategy import OuterResult
from trainer.pipeline.protocol.messages import ProgressReport
from trainer.pipeline.stage import StepInfo
from trainer.pipeline.worker.stepping import ProgressTracker

TAIL = WorkerSetup("tail", target_tokens=32, worker={"progress_interval_s": 0.05, "auto_step_s": 3600.0})
OWN = Identity.create()
OTHER = "b" * 64


@dataclass
class Rounds:
    """A strategy that commits every second step."""

    batches: list[int] = field(default_factory=list)
    members: tuple[str, ...] = (OWN.peer_id, OTHER)
    dropped: tuple[tuple[str, str], ...] = ()
    steps_ago: int | None = 0
    others_wait: bool = False

    def after_inner_step(self, num_batches: int = 1) -> OuterResult | None:
        self.batches.append(num_batches)
        return None if len(self.batches) % 2 else self.committed()

    def answer_others(self) -> OuterResult | None:
        waited, self.others_wait = self.others_wait, False
        return self.committed() if waited else None

    def committed(self) -> OuterResult:
        index = len(self.batches) // 2
        return OuterResult(
            round_index=index,
            fragment=0,
            outer_step=index + 1,
            committed=True,
            num_batches=1,
            waited_s=0.0,
            report=RoundReport(round_index=index, members=self.members, dropped=self.dropped),
            contributed_steps_ago=self.steps_ago,
        )


@asynccontextmanager
async def _stage(
    setup: WorkerSetup, strategies: Sequence[Rounds | None] = (None, None), others: Sequence[Peer] = ()
) -> AsyncIterator[list[RunningWorker]]:
    """Workers of one stage that know each other, and others."""
    peers = list(others)
    async with AsyncExitStack() as stack:
        options = [{"peers": lambda: tuple(peers), "strategy": strategy} for strategy in strategies]
        workers = [await stack.enter_async_context(running_worker(setup, **each)) for each in options]
        peers += [running.peer for running in workers]
        yield workers


@pytest.mark.slow
async def test_a_stage_of_one_steps_at_its_target_and_on_the_way_out_and_says_what_is_shared() -> None:
    steps: list[StepInfo] = []
    rounds: list[OuterResult] = []
    strategy = Rounds(others_wait=True)
    worker = running_worker(TAIL, identity=OWN, strategy=strategy, on_step=steps.append, on_round=rounds.append)
    async with worker as tail, running_driver() as driver:
        await until(lambda: bool(rounds))  # Others that wait for a round need not wait for a step.
        assert (len(rounds), strategy.batches, strategy.others_wait) == (1, [], False)
        replies = [await driver.tail(tail, f"e0.s0.r{2 * row}", TAIL_INPUT) for row in range(6)]
        await until(lambda: len(steps) == 3)
        assert [reply.body.version for reply in replies] == [0, 0, 1, 1, 2, 2]
        assert [(info.num_tokens, info.num_micro_batches, info.applied) for info in steps] == [(32, 2, True)] * 3
        assert strategy.batches == [2, 2, 2]
        status = await driver.status(tail)
        assert (status.version, status.applied, status.shared_through) == (3, 6, 4)
        await driver.tail(tail, "e0.s0.r12", TAIL_INPUT)
        await tail.worker.runtime.control(tail.worker.stepper.flush)
        assert (len(rounds), strategy.batches) == (3, [2, 2, 2, 1])
        assert (await driver.status(tail)).shared_through == 7


@pytest.mark.parametrize(
    ("strategy", "num_shared"),
    [
        (Rounds(), 4),
        (Rounds(steps_ago=1), 2),  # The second step was taken while the round ran: its weights are in none.
        (Rounds(steps_ago=30), 0),  # It began before anything was counted.
        (Rounds(steps_ago=None), 0),  # A newcomer's weights are in no average.
        (Rounds(members=(OWN.peer_id,)), 0),  # Alone, nothing outlives the worker.
        (Rounds(members=(OTHER, "c" * 64)), 0),
        (Rounds(dropped=((OWN.peer_id, "late"),)), 0),
        (Rounds(dropped=((OTHER, "late"),)), 4),
    ],
)
async def test_a_round_shares_what_others_hold_of_it_and_no_more(strategy: Rounds, num_shared: int) -> None:
    mine = replace(strategy, batches=[])
    async with running_worker(TAIL, identity=OWN, strategy=mine) as tail, running_driver() as driver:
        for row in range(4):
            await driver.tail(tail, f"e0.s0.r{2 * row}", TAIL_INPUT)
        await until(lambda: len(mine.batches) == 2)
        await tail.worker.runtime.control(lambda: None)  # Behind what follows the round.
        assert (await driver.status(tail)).shared_through == num_shared


@pytest.mark.slow
async def test_workers_step_together_and_who_has_nothing_follows_unchanged() -> None:
    strategies = [Rounds() for _ in range(3)]
    async with _stage(TAIL, strategies) as workers, running_driver() as driver:
        before = weights(workers[2].worker)
        await driver.tail(workers[0], "e0.s0.r0", TAIL_INPUT)
        await until(lambda: workers[1].worker.stepper._tracker.stage_tokens(0, 16) == 32)
        await driver.tail(workers[1], "e0.s0.r2", TAIL_INPUT)
        await until(lambda: all(running.worker.replica.version == 1 for running in workers))
        assert [strategy.batches for strategy in strategies] == [[1], [1], [0]]
        assert weights(workers[2].worker) == before != weights(workers[1].worker)
        assert weights(workers[0].worker) == weights(workers[1].worker)  # The same micro-batch, from the same start.


@pytest.mark.slow
async def test_an_idle_stage_steps_with_what_it_has_and_not_at_all_with_nothing() -> None:
    setup = replace(TAIL, worker={"auto_step_s": 0.2})
    async with running_worker(setup) as tail, running_worker(setup) as idle, running_driver() as driver:
        await driver.tail(tail, "e0.s0.r0", TAIL_INPUT)
        await until(lambda: tail.worker.replica.version == 1)
        await until(lambda: idle.worker.runtime.clock() - idle.worker.stepper._counted_s > 1.0)
        assert tail.worker.replica.version == 1
        assert idle.worker.replica.version == 0


@pytest.mark.slow
async def test_a_joining_worker_neither_steps_nor_counts() -> None:
    async with _stage(TAIL) as (first, joining), running_driver() as driver:
        joining.worker.stepper.joining = True
        for row in range(4):
            await driver.tail(first, f"e0.s0.r{2 * row}", TAIL_INPUT)
        await until(lambda: first.worker.replica.version == 2)
        assert joining.worker.replica.version == 0
        state = first.worker.replica.state_dict()
        await joining.worker.runtime.control(lambda: joining.worker.replica.load_state_dict(state))
        incarnation = joining.worker.replies.incarnation
        await joining.worker.runtime.control(lambda: joining.worker.stepper.start_over(2))
        joining.worker.stepper.joining = False
        assert joining.worker.replies.incarnation != incarnation
        for row in range(4, 6):
            await driver.tail(first, f"e0.s0.r{2 * row}", TAIL_INPUT)
        await until(lambda: joining.worker.replica.version == 3)


async def test_who_is_no_worker_of_the_stage_moves_nothing() -> None:
    async with running_worker(TAIL) as tail, running_driver() as stranger:
        report = ProgressReport(incarnation="0" * 16, version=7, num_tokens=1 << 40)
        answer = await stranger.endpoint.call(tail.peer, "stage/progress", report, ProgressReport, timeout_s=10)
        assert (answer.body.version, answer.body.num_tokens) == (0, 0)
        await stranger.tail(tail, "e0.s0.r0", TAIL_INPUT)
        assert tail.worker.replica.version == 0


def _report(version: int, num_tokens: int, *, joining: bool = False) -> ProgressReport:
    return ProgressReport(incarnation="0" * 16, version=version, num_tokens=num_tokens, joining=joining)


def _progress(*heard: tuple[int, int]) -> tuple[ProgressTracker, list[float]]:
    """What heard of others, by number: their versions and tokens."""
    now_s = [100.0]
    progress = ProgressTracker(1.0, 50, lambda: now_s[0])
    for number, (version, num_tokens) in enumerate(heard):
        progress.hear(str(number), _report(version, num_tokens))
    return progress, now_s


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=6), st.integers(1, 2**50))
def test_a_liar_makes_the_others_step_with_a_share_of_the_target_at_least(honest: list[int], lie: int) -> None:
    own, *others = honest
    progress, _ = _progress(*((3, num_tokens) for num_tokens in (*others, lie)))
    assert progress.stage_tokens(3, own) <= sum(honest) + 4 * max(honest)


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=6))
def test_who_has_the_most_knows_of_all(tokens: list[int]) -> None:
    *others, most = sorted(tokens)
    progress, _ = _progress(*((0, num_tokens) for num_tokens in others))
    assert progress.stage_tokens(0, most) == sum(tokens)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(0, 8), st.integers(-3, 60), st.integers(0, 2**50)), min_size=1, max_size=60),
    st.data(),
)
def test_liars_that_are_fewer_than_half_of_the_others_lead_nobody_away(num_honest, turns, data):
    """No honest worker steps with less than half of the target in what honest ones have and liars may add to it."""
    target_tokens = 1000
    num_liars = data.draw(st.integers(1, max(1, (num_honest - 1) // 2)))
    views = [_progress()[0] for _ in range(num_honest)]
    versions = [0] * num_honest
    counted: list[dict[int, int]] = [{0: 0} for _ in range(num_honest)]
    for more, ahead, claimed in turns:
        counted[more % num_honest][versions[more % num_honest]] += 10 * more
        for index, view in enumerate(views):
            for other in set(range(num_honest)) - {index}:
                view.hear(f"honest {other}", _report(versions[other], counted[other][versions[other]]))
            for liar in range(num_liars):
                view.hear(f"liar {liar}", _report(max(0, versions[index] + ahead), claimed))
        for index, view in enumerate(views):
            at = versions[index]
            followed = view.version_to_follow(at, counted[index][at], target_tokens, 0.0)
            if at < followed and max(versions) < followed:
                honest = [tokens.get(at, 0) for tokens in counted]
                assert followed == at + 1
                assert sum(honest) + num_liars * 4 * max(honest) >= target_tokens / 2
                versions[index] = followed
                counted[index][followed] = 0


def test_what_is_old_joining_or_too_far_ahead_counts_for_nothing_and_what_a_worker_stepped_with_is_remembered() -> None:
    progress, _ = _progress((3, 0), (3, 0), (3, 700))
    progress.hear("2", _report(4, 0))
    assert progress.stage_tokens(3, 300) == 1000
    assert progress.version_to_follow(3, 300, 1000, 0.0) == 4
    progress, now_s = _progress((5, 10), (9, 0), (5 + 51, 10))
    progress.hear("3", _report(5, 10, joining=True))
    assert progress.stage_tokens(5, 10) == 20
    assert progress.version_to_follow(5, 10, 40, 0.0) == 9  # Most of the others are there, or further.
    assert not progress.is_left_behind(5)
    progress.hear("0", _report(99, 10))
    assert progress.is_left_behind(5)
    progress.keep({"1"})
    assert not progress.is_left_behind(5)
    now_s[0] += 10.0
    assert progress.version_to_follow(5, 40, 40, 3600.0) == 5


@pytest.mark.slow
async def test_a_worker_that_does_not_answer_holds_up_nobody() -> None:
    async with AsyncExitStack() as stack:
        driver = await stack.enter_async_context(running_driver())
        silent = (await stack.enter_async_context(running_driver())).endpoint
        silent.register("stage/progress", ProgressReport, lambda _: asyncio.sleep(3600))
        # A step is told at once; what a busy machine would lose to a stall is told again an hour later only.
        setup = replace(TAIL, worker={"progress_interval_s": 3600.0}, rpc={"stall_timeout_s": 60.0})
        first, second = await stack.enter_async_context(_stage(setup, others=[silent.peer]))
        progress = second.worker.stepper._tracker
        for step in range(4):
            await driver.tail(first, f"e0.s0.r{4 * step}", TAIL_INPUT)
            # Who has not heard of half a step follows two intervals later only.
            await until(lambda step=step: any(it.tokens(step) == 16 for it in progress._recent()))
            await driver.tail(first, f"e0.s0.r{4 * step + 2}", TAIL_INPUT)
            await until(lambda step=step: second.worker.replica.version == step + 1)
