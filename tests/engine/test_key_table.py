"""The table of keys against a model of the server, whatever the order of events; and when busy keys are offered."""

from __future__ import annotations

from collections import Counter

from durable_actors._engine.keys.table import FIRST_OFFER, LONGEST_OFFER, Answer, BusyKeys, KeyTable
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

KEYS = st.sampled_from("kl")
CLAIMS = st.sampled_from("1234")


class Table(RuleBasedStateMachine):
    """A node's table, its session, and other nodes that lock keys, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = KeyTable()
        self.now = 0.0
        self.session: Counter[str] = Counter()
        """How often our session has each lock: the server counts."""
        self.elsewhere: set[str] = set()
        self.runs: dict[str, str] = {}
        """The claim that runs under each key here, with the lock or as a thread that outlived it."""
        self.queued: list[tuple[str, str]] = []
        self.gone: set[tuple[str, str]] = set()

    @rule(key=KEYS, claim=CLAIMS)
    def ask(self, key: str, claim: str) -> None:
        if (key, claim) in self.queued or self.runs.get(key) == claim:
            return  # a claim asks once
        answer = self.table.ask(key, claim)
        if answer is Answer.GRANTED:
            assert key not in self.runs
            assert self.session[key] == 1
            self.runs[key] = claim
        elif answer is Answer.ASK:
            assert key not in self.runs
            self.queued.append((key, claim))

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        key, claim = data.draw(st.sampled_from(self.queued))
        self.gone.add((key, claim))
        self.table.free(key, claim, self.now)

    @rule(key=KEYS, claim=CLAIMS)
    def free(self, key: str, claim: str) -> None:
        """Also of claims that have nothing, and twice."""
        if (key, claim) in self.queued:
            return
        self.table.free(key, claim, self.now)
        if self.runs.get(key) == claim:
            del self.runs[key]

    @rule(key=KEYS, claim=CLAIMS, to=CLAIMS)
    def hand_on(self, key: str, claim: str, to: str) -> None:
        """The claim is over, and a new one has the key's next row."""
        if (key, to) in self.queued or claim == to:
            return
        if self.table.hand_on(key, claim, to):
            assert self.runs[key] == claim
            assert self.session[key] == 1
            self.runs[key] = to

    @rule(lingers=st.booleans())
    def exchange(self, lingers: bool) -> None:
        for key in self.table.take_idle(self.now - 1 if lingers else self.now):
            assert self.session[key] == 1, "unlocked once per lock"
            self.session[key] -= 1
        self.table.unlocked(kept=(), now=self.now)
        queued, self.queued = self.queued, []
        here = self.table.locked_among([key for key, _ in queued])
        for key, claim in queued:
            got = key not in self.elsewhere
            self.session[key] += got and key not in here
            self.table.answered(key, got=got, now=self.now)
            if got and (key, claim) not in self.gone:
                assert key not in self.runs
                self.runs[key] = claim
            self.gone.discard((key, claim))

    @precondition(lambda self: self.table.idle)
    @rule(key=KEYS, claim=CLAIMS)
    def refused_exchange(self, key: str, claim: str) -> None:
        """Keys were to be unlocked, the server refuses, and one is asked for meanwhile."""
        free = self.table.take_idle(self.now)
        self.ask(key, claim)
        self.table.unlocked(kept=free, now=self.now)

    @rule()
    def lose(self) -> None:
        self.session.clear()
        self.table.lost()
        self.queued.clear()
        self.gone.clear()

    @rule(key=KEYS)
    def other_node(self, key: str) -> None:
        if key in self.elsewhere:
            self.elsewhere.remove(key)
        elif not self.session[key]:
            self.elsewhere.add(key)

    @rule()
    def tick(self) -> None:
        self.now += 1

    @invariant()
    def it_agrees_with_the_server(self) -> None:
        assert all(count <= 1 for count in self.session.values())
        assert self.table.locked == self.session.total()
        for key in "kl":
            owners = [claim for claim in "1234" if self.table.owns(key, claim)]
            expected = [self.runs[key]] if key in self.runs and self.session[key] else []
            assert owners == expected
        reserved = {key for key, _ in set(self.queued) - self.gone}
        idle = sum(1 for key in "kl" if self.session[key] and key not in self.runs and key not in reserved)
        assert self.table.idle == idle
        assert (self.table.next_idle is None) == (idle == 0)


Table.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTable = Table.TestCase


def test_a_busy_key_is_offered_after_a_pause_that_grows():
    busy, now, waits = BusyKeys(), 0.0, []
    for _ in range(5):
        busy.note("k", now)
        began = now
        while not busy.due(now):
            now += 0.25
        waits.append(now - began)
        busy.offered(busy.due(now), now)
        assert not busy.due(now)
    assert waits == [FIRST_OFFER, 2.0, 4.0, LONGEST_OFFER, LONGEST_OFFER]


def test_a_key_is_offered_a_few_times_until_it_is_met_again():
    """The first time its row may still be on its way back: then a row behind it is offered, and held again."""
    busy, times = BusyKeys(), []
    busy.note("k", 0.0)
    for now in range(20):
        if offers := busy.due(now):
            times.append(now)
            busy.offered(offers, now)
    assert times == [1, 2, 3]
    assert len(busy) == 0


def test_a_key_met_again_while_it_is_offered_begins_anew():
    """The offer under way was about the row before: the one that met the key just now is held, and nobody's."""
    busy = BusyKeys()
    busy.note("k", 0.0)
    for now in (1.0, 2.0):
        busy.offered(busy.due(now), now)
    offers = busy.due(3.0)
    busy.note("k", 3.1)
    busy.offered(offers, 3.2)
    assert not busy.due(5.0)
    assert set(busy.due(5.1)) == {"k"}


def test_when_its_holder_here_exits_it_is_offered_at_once():
    busy = BusyKeys()
    busy.hurry("k", 0.0)
    assert not busy.due(0.0)
    busy.note("k", 0.0)
    busy.hurry("k", 0.1)
    assert set(busy.due(0.1)) == {"k"}


def test_when_the_session_is_back_nothing_waits_any_longer():
    busy = BusyKeys()
    for _ in range(5):
        busy.note("k", 0.0)
    busy.note("l", 0.0)
    busy.hurry_all(0.1)
    assert set(busy.due(0.1)) == {"k", "l"}


def test_a_key_that_was_got_is_forgotten():
    busy = BusyKeys()
    busy.note("k", 0.0)
    offers = busy.due(1.0)
    busy.got("k")
    busy.offered(offers, 1.0)
    assert not busy.due(100.0)
