"""Which contributions a node reads: a bounded number of each key and of all new ones, each of them once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.errors import StoreUnavailableError
from tests.support.bucket_rounds import NUM_VALUES, Interposed, Replica, folder, settings_of, together
from trainer.bucket_rounds.fetching import ContributionId, FetchedContributions, id_of, wanted
from trainer.bucket_rounds.place import ListedContribution, RoundListing
from trainer.bucket_rounds.rules import RoundFacts

FACTS = RoundFacts(3, "", "dense-fp32", 8, None)
KNOWN = {f"{number:064x}" for number in range(2)}
MEMBERS = st.sampled_from([f"{number:064x}" for number in range(7)])
LISTED = st.builds(
    ListedContribution, MEMBERS, st.sampled_from([f"{number:064x}" for number in range(9)]), st.just(8), st.floats(0, 9)
)


def to_read(listed: list[ListedContribution], seen: set[ContributionId], max_members: int) -> list[ContributionId]:
    listing = RoundListing(contributions=tuple(listed))
    found = wanted(listing, seen, FACTS, run_id="test", known=KNOWN, max_members=max_members)
    return [id_of(each) for each in found]


@given(st.lists(LISTED, unique_by=id_of, max_size=40), st.integers(1, 6), st.randoms(use_true_random=False))
def test_what_is_read_is_bounded_over_all_looks(
    listed: list[ListedContribution], max_members: int, rng: random.Random
) -> None:
    """However a bucket fills between looks, and whether reads fail, no more is read than a single look may."""
    seen: set[ContributionId] = set()
    for end in sorted(rng.sample(range(len(listed) + 1), min(3, len(listed) + 1))):
        found = to_read(listed[:end], seen, max_members)
        assert not set(found) & seen
        is_new = [member not in KNOWN for member, _ in found]
        assert is_new == sorted(is_new)
        seen.update(found[: rng.randint(0, len(found))])
        numbers = Counter(member for member, _ in seen)
        assert all(number <= (4 if member in KNOWN else 2) for member, number in numbers.items())
        assert sum(number for member, number in numbers.items() if member not in KNOWN) <= max_members


@given(st.lists(LISTED, unique_by=(id_of, lambda it: it.put_at), max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_a_listing_does_not_count(listed: list[ListedContribution], rng: random.Random) -> None:
    shuffled = list(listed)
    rng.shuffle(shuffled)
    assert to_read(shuffled, set(), 3) == to_read(listed, set(), 3)


def test_each_new_key_has_a_payload_read_before_any_has_two() -> None:
    keys = [f"{number:064x}" for number in range(2, 6)]
    many = [ListedContribution(keys[0], f"{number:064x}", 8, float(number)) for number in range(9)]
    few = [ListedContribution(key, "f" * 64, 8, 99.0) for key in keys[1:]]
    assert sorted(member for member, _ in to_read(many + few, set(), 4)) == keys


def test_a_read_that_fails_has_nothing_read_again_but_what_failed(tmp_path: Path) -> None:
    replicas = [Replica(settings_of(folder(tmp_path))) for _ in range(4)]
    together({str(number): each.take_part for number, each in enumerate(replicas)})
    reads: Counter[str] = Counter()

    def fail_once(_name: str, key: str) -> None:
        reads[key] += 1
        if reads.total() == 1:
            raise StoreUnavailableError("500 Internal Server Error; run the same command again")

    settings = settings_of(Interposed(folder(tmp_path), fail_once))
    facts = RoundFacts(0, "", settings.form_of(NUM_VALUES).name, NUM_VALUES, None)
    listed = Replica(settings_of(folder(tmp_path))).settings.place.round(0).contributions
    fetched = FetchedContributions(settings, facts, 8 * NUM_VALUES)
    with pytest.raises(StoreUnavailableError):
        fetched.fetch(listed)
    assert fetched.num_judged == 3
    fetched.fetch(listed)
    assert fetched.read.keys() == {id_of(each) for each in listed}
    assert sorted(reads.values()) == [1, 1, 1, 2]
