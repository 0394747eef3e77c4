"""Which contributions a node reads: a bounded number of each key and of all new ones, whatever lies in the bucket."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from trainer.bucket_rounds.fetching import ContributionId, id_of, wanted
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
