"""Rounds through a bucket among members in threads: alike in every bit, whoever dies, lies, comes late, or stalls."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from genesis.errors import StoreUnavailableError
from genesis.store.base import CachePolicy, Store
from tests.support.bucket_rounds import (
    FAST,
    NUM_VALUES,
    Interposed,
    KilledError,
    Killing,
    Replica,
    folder,
    settings_of,
    together,
)
from trainer.aggregation import RuleConfig
from trainer.aggregation.sparse import Averaging
from trainer.bucket_rounds.documents import (
    Agreement,
    ContributionHeader,
    StateRecord,
    contribution_body,
    payload_digest,
)
from trainer.bucket_rounds.forms import DenseForm, SparseForm
from trainer.bucket_rounds.history import History
from trainer.bucket_rounds.object_names import agreement_key, contribution_key, state_key
from trainer.bucket_rounds.own_contribution import OwnContribution
from trainer.bucket_rounds.place import Place
from trainer.bucket_rounds.reducers import SlicedForm
from trainer.bucket_rounds.rules import weights_of
from trainer.bucket_rounds.settings import BucketSettings
from trainer.compression.vectors import codec_named
from trainer.errors import RoundFailedError, StateBehindError
from trainer.network.rpc import Identity

ROBUST = RuleConfig()


def members(path: Path, count: int, **options: object) -> list[Replica]:
    return [Replica(settings_of(folder(path), **options)) for _ in range(count)]  # type: ignore[arg-type]


def one_round(replicas: list[Replica]) -> None:
    together({str(number): each.take_part_and_keep for number, each in enumerate(replicas)})


def assert_alike(replicas: list[Replica]) -> None:
    assert len({each.digest() for each in replicas}) == 1
    assert len({each.round_index for each in replicas}) == 1


def agreements_in(path: Path) -> dict[str, int]:
    counts: dict[str, int] = {}
    for info in folder(path).list("rounds/"):
        if "/agreement-" in info.key:
            counts[info.key.split("/")[1]] = counts.get(info.key.split("/")[1], 0) + 1
    return counts


@pytest.mark.parametrize("codec", ["fp32", pytest.param("fp16", marks=pytest.mark.slow), "int8"])
@pytest.mark.parametrize(
    "rule", ["mean", "trimmed_mean", "krum", pytest.param("centered_clip", marks=pytest.mark.slow)]
)
def test_members_end_alike_with_one_agreement_a_round(tmp_path: Path, codec: str, rule: str) -> None:
    replicas = members(tmp_path, 5, codec=codec, rule=RuleConfig(rule=rule))  # type: ignore[arg-type]
    for _ in range(2):
        one_round(replicas)
        assert_alike(replicas)
    assert agreements_in(tmp_path) == {"0000000000": 1, "0000000001": 1}
    assert [len(each.report.members) for each in replicas[0].results] == [5, 5]


@pytest.mark.parametrize("averaging", ["replicas", "senders"])
def test_sparse_members_end_alike_and_keep_what_was_not_sent(tmp_path: Path, averaging: Averaging) -> None:
    form_of = partial(SparseForm, averaging=averaging)
    replicas = members(tmp_path, 4, rule=ROBUST, form_of=form_of)
    liar = replicas[0]
    liar.lie = lambda vector: -50.0 * vector
    for _ in range(2):
        one_round(replicas)
        assert_alike(replicas)
    report = replicas[1].results[0].report
    assert report.rule == "clipped_mean"
    assert report.sent_bytes < 8000
    honest = replicas[1].residual
    assert honest is not None
    assert int((honest == 0).sum()) < 100
    assert liar.residual is None
    assert liar.settings.own_id in dict(report.dropped)


def test_fp32_mean_is_the_weighted_mean_of_what_members_brought(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3)
    brought = [each.work() for each in replicas]
    one_round(replicas)
    expected = sum(brought) / 3  # type: ignore[operator]
    torch.testing.assert_close(replicas[0].results[0].vector, expected)
    assert replicas[0].residual is None


def test_what_int8_leaves_out_comes_with_the_next_round(tmp_path: Path) -> None:
    replicas = members(tmp_path, 2, codec="int8")
    one_round(replicas)
    for each in replicas:
        residual = each.residual
        assert residual is not None
        assert 0 < float(residual.abs().max()) < 0.02


def test_a_member_that_was_left_out_has_its_work_in_the_next_round(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3)
    late = replicas[2]
    one_round(replicas[:2])
    brought = late.work()
    result = late.take_part_and_keep()
    assert late.settings.own_id not in result.report.members
    assert_alike(replicas)
    residual = late.residual
    assert residual is not None
    torch.testing.assert_close(residual, brought)
    one_round(replicas)
    assert_alike(replicas)
    assert len(replicas[0].results[-1].report.members) == 3


def test_a_member_that_was_away_makes_up_for_the_rounds_it_missed(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3)
    one_round(replicas)
    for _ in range(2):
        one_round(replicas[:2])
    for _ in range(2):
        replicas[2].take_part(num_batches=0)
    assert_alike(replicas)


def test_a_member_with_another_state_is_told_so(tmp_path: Path) -> None:
    replicas = members(tmp_path, 4)
    one_round(replicas)
    replicas[3].anchor = replicas[3].anchor + 1.0
    calls: dict[str, Callable[[], object]] = {str(number): each.take_part for number, each in enumerate(replicas[:3])}

    def diverged() -> object:
        with pytest.raises(StateBehindError):
            replicas[3].take_part()
        return replicas[3].collective.behind

    results = together({**calls, "diverged": diverged})
    assert results["diverged"] is True
    assert_alike(replicas[:3])


def test_contributions_that_were_removed_make_a_member_fetch_the_state(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3)
    one_round(replicas)
    for _ in range(2):
        one_round(replicas[:2])
    for number, listing in replicas[0].settings.place.rounds().items():
        for each in listing.contributions if number < 2 else ():
            folder(tmp_path).delete(contribution_key(number, each.member, each.payload_sha256))
    with pytest.raises(StateBehindError):
        replicas[2].take_part()


def test_a_dead_member_costs_one_waiting_time_and_then_nothing(tmp_path: Path) -> None:
    replicas = members(tmp_path, 4)
    one_round(replicas)
    for _ in range(2):
        one_round(replicas[:3])
        assert_alike(replicas[:3])
    assert len(replicas[0].results[-1].report.members) == 3


def test_few_of_many_wait_longer_before_they_go_on_alone(tmp_path: Path) -> None:
    replicas = members(tmp_path, 5, config=replace(FAST, few_members_after_s=3.0))
    one_round(replicas)
    alone = replicas[0]
    began_s = time.monotonic()
    alone.take_part()
    assert alone.results[-1].report.members == (alone.settings.own_id,)
    assert time.monotonic() - began_s >= 3.0


# -- deaths ------------------------------------------------------------------------------------------------------------


def killed_run(path: Path, seed: int, num_rounds: int = 5, num_deaths: int = 6) -> list[Replica]:
    """Four members, of which one after the other dies at some call of the store and is started again."""
    rng = random.Random(seed)
    replicas = members(path, 4, codec=rng.choice(["fp32", "int8"]))
    deaths = [(rng.randrange(4), rng.randint(1, 45), rng.random() < 0.5) for _ in range(num_deaths)]
    by_member: dict[int, list[tuple[int, bool]]] = {}
    for number, call, after in deaths:
        by_member.setdefault(number, []).append((call, after))

    def live(number: int) -> Replica:
        replica = replicas[number]
        for call, after in by_member.get(number, []):
            replica = replica.reborn(Killing(call, after=after).over(folder(path)))
            with suppress(KilledError):
                go_on(replica)
            if replica.round_index >= num_rounds:
                break
        if replica.round_index < num_rounds:
            replica = replica.reborn(folder(path))
            go_on(replica)
        return replica

    def go_on(replica: Replica) -> None:
        while replica.round_index < num_rounds:
            replica.take_part()
            replica.keep()

    ended = together({str(number): (lambda number=number: live(number)) for number in range(4)})
    return [each for each in ended.values() if isinstance(each, Replica)]


def assert_killed_run(path: Path, seed: int) -> None:
    replicas = killed_run(path, seed)
    assert len(replicas) == 4
    for round_index in range(1, 6):
        held = {each.digests[round_index] for each in replicas if round_index in each.digests}
        assert len(held) == 1, f"round {round_index} of seed {seed}"
    assert agreements_in(path) == {f"{number:010d}": 1 for number in range(5)}
    place, rules = Place(folder(path)), replicas[0].settings.rules
    for round_index in range(5):
        agreement = History(place, rules).accepted(round_index)
        assert agreement is not None
        assert len(set(agreement.keys)) == len(agreement.keys)
        for info in place.round(round_index).contributions:
            own = [each for each in place.round(round_index).contributions if each.member == info.member]
            assert len(own) == 1, "a member contributed twice"


@pytest.mark.parametrize("seed", range(3))
def test_members_killed_anywhere_end_alike(tmp_path: Path, seed: int) -> None:
    assert_killed_run(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 33))
def test_members_killed_anywhere_end_alike_in_thirty_more_schedules(tmp_path: Path, seed: int) -> None:
    assert_killed_run(tmp_path, seed)


# -- the store ---------------------------------------------------------------------------------------------------------


def test_a_store_that_fails_costs_time_only(tmp_path: Path) -> None:
    rng, guard = random.Random(1), threading.Lock()

    def fail(_name: str, _key: str) -> None:
        with guard:
            fails = rng.random() < 0.3
        if fails:
            raise StoreUnavailableError("500 Internal Server Error; run the same command again")

    replicas = [Replica(settings_of(Interposed(folder(tmp_path), fail), gather_timeout_s=3.0)) for _ in range(4)]
    for _ in range(3):
        together({str(number): each.take_part for number, each in enumerate(replicas)})
        assert_alike(replicas)
    assert [len(each.report.members) for each in replicas[0].results] == [4, 4, 4]


@pytest.mark.slow
def test_a_store_that_stalls_costs_time_only(tmp_path: Path) -> None:
    stalled = threading.Event()

    def stall(name: str, key: str) -> None:
        if "0000000001" in key and name == "put" and not stalled.is_set():
            stalled.set()
            time.sleep(3.0)

    replicas = [Replica(settings_of(Interposed(folder(tmp_path), stall), gather_timeout_s=6.0)) for _ in range(3)]
    for _ in range(3):
        one_round(replicas)
        assert_alike(replicas)
    assert stalled.is_set()
    assert [len(each.report.members) for each in replicas[0].results] == [3, 3, 3]


def test_a_store_that_stays_away_fails_the_round_and_the_work_goes_into_the_next(tmp_path: Path) -> None:
    away = threading.Event()

    def fail(_name: str, _key: str) -> None:
        if away.is_set():
            raise StoreUnavailableError("no answer; run the same command again")

    settings = settings_of(Interposed(folder(tmp_path), fail), round_timeout_s=0.5)
    replica = Replica(settings)
    away.set()
    with pytest.raises(RoundFailedError):
        replica.take_part()
    away.clear()
    again = replica.reborn(folder(tmp_path))
    again.collective = Replica(replace(again.settings, round_timeout_s=30.0)).collective
    again.take_part()
    assert again.round_index == 1


def test_a_name_that_takes_no_agreement_and_that_no_listing_shows_costs_a_look_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / agreement_key(0, 0)).mkdir(parents=True)
    replica = Replica(settings_of(folder(tmp_path), round_timeout_s=2.5, gather_timeout_s=0.2))
    with pytest.raises(RoundFailedError):
        replica.take_part()
    most_looks = 2.5 / replica.settings.config.poll_interval_s
    assert replica.settings.place.cost.num_writes < 20 + 3 * most_looks
    assert caplog.text.count("takes no agreement, and no listing shows one") == 1


# -- liars -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "num_liars"), [(4, 1), (7, 2)])
@pytest.mark.parametrize("lie", [lambda v: -20.0 * v, lambda v: v.roll(7) * 3.0, lambda v: torch.full_like(v, 1e30)])
def test_lies_in_contributions_hardly_move_the_result(
    tmp_path: Path, count: int, num_liars: int, lie: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    replicas = members(tmp_path, count, rule=RuleConfig(num_byzantine=num_liars))
    for each in replicas[:num_liars]:
        each.lie = lie
    one_round(replicas)
    assert_alike(replicas)
    honest = torch.linspace(-1, 1, replicas[0].num_values)
    assert float((replicas[0].results[0].vector - honest).norm() / honest.norm()) < 0.3


def put_contribution(settings: BucketSettings, round_index: int, payload: bytes, **changes: object) -> None:
    made = Replica(settings).contribution()
    header = ContributionHeader(
        run_id="test",
        member=settings.own_id,
        round_index=round_index,
        state_digest=made.state_digest,
        form="dense-fp32",
        num_values=made.vector.numel(),
        payload_bytes=len(payload),
        payload_sha256=payload_digest(payload),
        claims={"num_batches": 4, "age_s": 1.0, "progress": 1.0, "vocabulary_rows": 0},  # type: ignore[arg-type]
    ).model_copy(update=changes)
    body = contribution_body(header.signed(settings.identity), payload)
    settings.place.put_once(contribution_key(round_index, settings.own_id, payload_digest(payload)), body)


def test_garbage_in_the_bucket_is_passed_over(tmp_path: Path) -> None:
    store = folder(tmp_path)
    stranger = settings_of(store)
    nan = torch.full((3000,), torch.nan).numpy().tobytes()
    put_contribution(stranger, 0, b"short")
    put_contribution(settings_of(store), 0, nan)
    forged = contribution_key(0, Identity.create().peer_id, "0" * 64)
    for key in (forged, "rounds/0000000000/notes.txt", "rounds/0000000000/contribution-me", "rounds/00/agreement-000"):
        store.put(key, b"garbage" * 100, cache=CachePolicy.NONE)
    store.put(contribution_key(0, "f" * 64, "1" * 64), bytes(1 << 20), cache=CachePolicy.NONE)
    replicas = members(tmp_path, 3, rule=ROBUST)
    one_round(replicas)
    assert_alike(replicas)
    report = replicas[0].results[0].report
    assert {each.settings.own_id for each in replicas} <= set(report.members)
    assert "f" * 64 not in report.members
    dropped = dict(report.dropped)
    assert all(key not in dropped for key in (each.settings.own_id for each in replicas))


def forged_agreement(settings: BucketSettings, honest: Agreement, **changes: object) -> bytes:
    return honest.model_copy(update=changes).signed(settings.identity).wire()


@pytest.mark.parametrize(
    "kind",
    [
        "garbage",
        "too early",
        "weights",
        pytest.param("absent", marks=pytest.mark.slow),
        "not a member",
        "too large",
        "another attempt",
        "repeated",
    ],
)
def test_a_void_agreement_costs_an_attempt_and_its_proposer_the_round(tmp_path: Path, kind: str) -> None:
    store = folder(tmp_path)
    honest = members(tmp_path, 4, rule=ROBUST)
    one_round(honest)
    liar = honest[3].settings
    put_contribution_of(honest[3])
    mine = next(each for each in Place(store).round(1).contributions if each.member == liar.own_id)
    before = History(Place(store), liar.rules).accepted(0)
    assert before is not None
    own = {
        "member": liar.own_id,
        "payload_sha256": mine.payload_sha256,
        "claims": {"num_batches": 4, "age_s": 1.0, "progress": 1.0, "vocabulary_rows": 0},
        "weight": 2.0,
    }
    agreement = Agreement.model_validate_json(
        Agreement(
            run_id="test",
            member=liar.own_id,
            round_index=1,
            attempt=0,
            follows=before.digest,
            state_digest=honest[3].digest(),
            form="dense-fp32",
            num_values=honest[3].num_values,
            members=(own,),  # type: ignore[arg-type]
        ).model_dump_json()
    )
    entry = agreement.members[0]
    wire = {
        "garbage": b"{}",
        "too large": b"x" * (1 << 20),
        "too early": forged_agreement(liar, agreement),
        "weights": forged_agreement(liar, agreement, members=(entry.model_copy(update={"weight": 1000.0}),)),
        "absent": forged_agreement(liar, agreement, members=(entry.model_copy(update={"payload_sha256": "a" * 64}),)),
        "not a member": forged_agreement(settings_of(store), agreement),
        "another attempt": forged_agreement(liar, agreement, attempt=3),
        "repeated": forged_agreement(liar, agreement, members=(entry, entry)),
    }[kind]
    store.put(agreement_key(1, 0), wire, cache=CachePolicy.NONE)
    truthful = honest[:3]
    one_round(truthful)
    assert_alike(truthful)
    accepted = History(Place(store), liar.rules).accepted(1)
    assert accepted is not None
    assert accepted.attempt == 1
    assert accepted.member != liar.own_id or kind in ("garbage", "too large", "not a member")


def put_contribution_of(replica: Replica) -> None:
    """Puts what a member would bring, and nothing else of it."""
    contribution = replica.contribution()
    form = replica.settings.form_of(replica.num_values)
    payload = bytes(form.encode(contribution.vector))
    put_contribution(replica.settings, replica.round_index, payload, state_digest=replica.digest())


def test_who_is_not_named_takes_no_part(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3)
    allowed = {each.settings.own_id for each in replicas[:2]}

    def refusal(header: ContributionHeader | StateRecord, _put_at: float) -> str:
        return "" if header.member in allowed else "not named"

    replicas = [Replica(replace(each.settings, refusal=refusal, round_timeout_s=5.0)) for each in replicas]

    def stranger() -> object:
        result = replicas[2].take_part()
        return result.report.members

    results = together({"0": replicas[0].take_part, "1": replicas[1].take_part, "2": stranger})
    assert set(results["2"]) == allowed  # type: ignore[call-overload]


# -- what newcomers find -----------------------------------------------------------------------------------------------


def test_most_members_vouch_for_the_newest_state(tmp_path: Path) -> None:
    replicas = members(tmp_path, 3)
    for _ in range(2):
        one_round(replicas)
    place, rules = Place(folder(tmp_path)), replicas[0].settings.rules
    newest = History(place, rules).newest()
    assert newest is not None
    assert newest.round_index == 1
    record = History(place, rules).vouched_state(newest)
    assert record is not None
    assert record.state_digest == replicas[0].digest()
    # One of three lies, and a second does not answer: nobody is believed.
    folder(tmp_path).delete(state_key(1, replicas[0].settings.own_id))
    folder(tmp_path).delete(state_key(1, replicas[1].settings.own_id))
    assert History(place, rules).vouched_state(newest) is None


def put_round_of(store: Store, stranger: BucketSettings, follows: Agreement) -> Agreement:
    """Puts an agreement that lists a stranger alone, and the stranger's word for the state after it."""
    entry = follows.members[0].model_copy(update={"member": stranger.own_id})
    said = {"round_index": follows.round_index + 1, "follows": follows.digest, "members": (entry,)}
    own = follows.model_copy(update=said)
    weights = weights_of([entry.claims], stranger.rules)
    own = own.model_copy(update={"members": (entry.model_copy(update={"weight": weights[0]}),)}).signed(
        stranger.identity
    )
    store.put(agreement_key(own.round_index, 0), own.wire(), cache=CachePolicy.NONE)
    record = StateRecord(
        run_id="test",
        member=stranger.own_id,
        round_index=own.round_index,
        agreement=own.digest,
        state_digest="e" * 64,
        snapshot="f" * 64,
    ).signed(stranger.identity)
    store.put(state_key(own.round_index, stranger.own_id), record.wire(), cache=CachePolicy.NONE)
    return own


@pytest.mark.parametrize("admits", ["names", "an authority"])
def test_a_stranger_with_credentials_for_the_bucket_has_no_state_of_its_own_believed(
    tmp_path: Path, admits: str
) -> None:
    replicas = members(tmp_path, 3)
    one_round(replicas)
    place, stranger = Place(folder(tmp_path)), settings_of(folder(tmp_path))
    allowed = [each.settings.own_id for each in replicas]
    rules = replicas[0].settings.rules
    newest = History(place, rules).newest()
    assert newest is not None
    forged = put_round_of(folder(tmp_path), stranger, newest)
    if admits == "names":
        rules = replace(rules, members=tuple(sorted(allowed)))
        assert History(place, rules).accepted(forged.round_index) is None
        assert History(place, rules).newest() == newest
    else:

        def refusal(document: ContributionHeader | StateRecord, _put_at: float) -> str:
            return "" if document.member in allowed else "no credential"

        assert History(place, rules).vouched_state(forged) is not None
        assert History(place, rules, refusal).vouched_state(forged) is None
        assert History(place, rules, refusal).vouched_state(newest) is not None


def test_of_two_agreements_for_a_round_the_one_counts_that_most_members_went_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.bucket_rounds.proposals._ABSENT_AFTER_S", 1.0)
    replicas = members(tmp_path, 3)
    one_round(replicas)
    place, rules = Place(folder(tmp_path)), replicas[0].settings.rules
    first = History(place, rules).accepted(0)
    assert first is not None
    stranger = settings_of(folder(tmp_path))
    forged = put_round_of(folder(tmp_path), stranger, first)
    one_round(replicas)
    put_round_of(folder(tmp_path), stranger, forged)  # It follows its own, as if a round had judged that.
    accepted = History(place, rules).accepted(1)
    assert accepted is not None
    assert set(accepted.keys) == {each.settings.own_id for each in replicas}


def test_agreements_beyond_a_gap_are_not_the_runs(tmp_path: Path) -> None:
    replicas = members(tmp_path, 2)
    one_round(replicas)
    stranger = settings_of(folder(tmp_path))
    first = History(Place(folder(tmp_path)), stranger.rules).accepted(0)
    assert first is not None
    far = first.model_copy(update={"round_index": 900})
    folder(tmp_path).put(agreement_key(900, 0), far.signed(stranger.identity).wire(), cache=CachePolicy.NONE)
    unlinked = first.model_copy(update={"round_index": 1, "follows": "b" * 64})
    folder(tmp_path).put(agreement_key(1, 0), unlinked.signed(stranger.identity).wire(), cache=CachePolicy.NONE)
    newest = History(Place(folder(tmp_path)), stranger.rules).newest()
    assert newest is not None
    assert newest.digest == first.digest


@pytest.mark.slow
def test_garbage_where_the_next_rounds_agreement_belongs_ends_no_round(tmp_path: Path) -> None:
    """With it, an agreement that lists what is not there would have sent all members to fetch a state."""
    store = folder(tmp_path)
    replicas = members(tmp_path, 3, rule=ROBUST)
    one_round(replicas)
    store.put(agreement_key(2, 0), b"garbage", cache=CachePolicy.NONE)
    liar = replicas[2]
    put_contribution_of(liar)
    before = History(Place(store), liar.settings.rules).accepted(0)
    assert before is not None
    absent = before.model_copy(
        update={
            "round_index": 1,
            "follows": before.digest,
            "state_digest": liar.digest(),
            "members": (
                before.members[0].model_copy(update={"member": liar.settings.own_id, "payload_sha256": "a" * 64}),
            ),
        }
    )
    store.put(agreement_key(1, 0), absent.signed(liar.settings.identity).wire(), cache=CachePolicy.NONE)
    one_round(replicas[:2])
    assert_alike(replicas[:2])


def test_what_is_left_of_work_in_slices_is_measured_from_what_an_earlier_life_put(tmp_path: Path) -> None:
    config = replace(FAST, quorum=1)
    settings = settings_of(
        folder(tmp_path),
        config=config,
        form_of=lambda num_values: SlicedForm(DenseForm(codec_named("fp32"), num_values, num_threads=1), 4),
    )
    assert OwnContribution(settings, Replica(settings).contribution(), settings.form_of(NUM_VALUES)).put()
    result = Replica(settings, lie=lambda vector: vector + 1).take_part()
    assert result.residual is not None
    torch.testing.assert_close(result.residual, torch.ones(NUM_VALUES))
