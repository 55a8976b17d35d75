"""The buffer of a dispatcher: claims that lack their key stand apart, so that nobody walks past them."""

from __future__ import annotations

import random

import pytest
from durable_actors._engine.claims import ActiveClaim
from durable_actors._engine.running.buffer import ClaimBuffer
from durable_actors._store.rows import Claim
from tests.engine.kit import claim


class Owned:
    """Which claims own their key; counts how often somebody asked."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.asked = 0

    def __call__(self, one: Claim) -> bool:
        self.asked += 1
        return one.claim_id in self.ids


def buffered(buffer: ClaimBuffer, key: str | None, *numbers: int, priority: int = 4) -> list[ActiveClaim]:
    added = [ActiveClaim(claim(None if key is None else f"{key} {n}", n, priority=priority)) for n in numbers]
    buffer.add(added, keyed=key is not None)
    return added


def own(owned: Owned, actives: list[ActiveClaim]) -> None:
    owned.ids.update(active.claim.claim_id for active in actives)


def test_a_thousand_claims_without_their_keys_cost_nobody_a_look():
    owned = Owned()
    buffer = ClaimBuffer(owned)
    lacking = buffered(buffer, "k", *range(1000))
    own(owned, handed := [ActiveClaim(claim("h", number)) for number in range(1000, 1500)])
    buffer.add(handed, keyed=True)
    owned.asked = 0
    assert [buffer.pop_startable() for _ in handed] == handed
    assert [buffer.pop_startable() for _ in range(500)] == [None] * 500
    assert owned.asked == len(handed)  # once each, although a thousand others came before
    own(owned, lacking)
    assert buffer.pop_startable() is None
    buffer.sort_out()
    assert [buffer.pop_startable() for _ in lacking] == lacking


def test_a_claim_whose_key_went_with_its_session_waits_for_it_again():
    owned = Owned()
    buffer = ClaimBuffer(owned)
    first, second = buffered(buffer, "k", 1, 2)
    own(owned, [first, second])
    buffer.sort_out()
    owned.ids.clear()
    assert (buffer.without_key(lost=False), buffer.without_key(lost=True)) == ([], [first, second])
    assert buffer.without_key(lost=False) == [first, second]
    own(owned, [first, second])
    buffer.sort_out()
    owned.ids.clear()
    own(owned, [second])
    assert buffer.pop_startable() is second
    assert (buffer.pop_startable(), len(buffer), buffer.without_key(lost=False)) == (None, 1, [first])
    own(owned, [first])
    buffer.sort_out()
    assert buffer.pop_startable() is first


def test_what_got_its_key_takes_its_turn_by_priority():
    owned = Owned()
    buffer = ClaimBuffer(owned)
    plain = buffered(buffer, None, 1, 2)
    urgent = buffered(buffer, "k", 3, priority=1)
    late = buffered(buffer, "l", 4, priority=9)
    assert buffer.priority == 1
    own(owned, [*urgent, *late])
    buffer.sort_out()
    assert [buffer.pop_startable() for _ in range(5)] == [*urgent, *plain, *late, None]


def test_the_least_urgent_is_given_back_first_whatever_it_lacks():
    buffer = ClaimBuffer(Owned())
    [plain] = buffered(buffer, None, 1)
    [lacking] = buffered(buffer, "k", 2)
    [urgent] = buffered(buffer, "u", 3, priority=1)
    assert [buffer.pop_last() for _ in range(3)] == [lacking, plain, urgent]
    assert len(buffer) == 0


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_list_by_priority(seed: int):
    """Beside a model: a pop finds the most urgent that may start, and nothing is lost or there twice."""
    rng, owned = random.Random(seed), Owned()
    buffer = ClaimBuffer(owned)
    inside: list[ActiveClaim] = []
    for number in range(300):
        action = rng.choice(["add", "add", "own", "lose", "pop", "remove", "last"])
        if action == "add":
            at = rng.choice([1, 4, 9])
            inside += buffered(
                buffer, rng.choice([None, "k"]), *range(number * 10, number * 10 + 3), priority=at
            )
        elif action == "own":
            own(owned, [active for active in inside if rng.random() < 0.5])
            buffer.sort_out()
        elif action == "lose" and rng.random() < 0.2:
            owned.ids.clear()
        elif action == "pop":
            may = [each for each in inside if each.claim.partition_key is None or owned(each.claim)]
            found = buffer.pop_startable()
            assert (found is None) == (not may)
            if found is not None:
                assert found in may
                assert found.claim.priority == min(each.claim.priority for each in may)
                inside.remove(found)
        elif action == "remove" and inside:
            buffer.remove([gone := rng.choice(inside)])
            inside.remove(gone)
        elif action == "last" and inside:
            last = buffer.pop_last()
            assert last.claim.priority == max(each.claim.priority for each in inside)
            inside.remove(last)
        assert sorted(map(id, buffer)) == sorted(map(id, inside))
        if inside:
            assert buffer.priority == min(each.claim.priority for each in inside)
