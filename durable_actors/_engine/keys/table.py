"""Which claim owns which partition key on this node. Sans-I/O; time is an argument.

The session's locks are re-entrant: Postgres would grant a key twice to one session. So the node keeps its own table of
owners. The states of a key:

    locked by the session?   has an owner?
    no                       no             unknown: not in the table
    being asked for          yes            reserved: no other claim here may ask
    yes                      yes            a step runs under it
    yes                      no             idle: the next taker here gets it without SQL; else it is unlocked soon
    no                       yes            the session was lost, and the task or thread has not exited yet

An owner is a claim, and only that claim (by its id) frees the key. From entering the table until leaving it, a key is
locked once and unlocked once on the server.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

FIRST_OFFER: Final = 1.0
"""Seconds until the rows of a busy key are offered again, the first time."""
LONGEST_OFFER: Final = 5.0
"""Seconds between two offers, at most."""
OFFERS: Final = 3
"""How often a key's rows are offered again if no claim asks for the key."""


class Answer(enum.Enum):
    """The answer to a claim that asks for its key."""

    GRANTED = enum.auto()
    """The claim owns the key now; no SQL needed."""
    ASK = enum.auto()
    """The key is reserved for the claim; the server must be asked."""
    BUSY = enum.auto()
    """Another claim of this node owns or has reserved it."""


class KeyTable:
    """The keys of one node."""

    __slots__ = ("_asked", "_idle", "_leaving", "_locked", "_owners")

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._locked: set[str] = set()
        self._asked: set[str] = set()  # a lock statement for it is queued or under way
        self._idle: dict[str, float] = {}  # locked without an owner, since when; oldest first
        self._leaving = 0  # keys whose unlock statement is under way

    # -- called for claims

    def ask(self, key: str, claim: str) -> Answer:
        """A claim wants its key."""
        owner = self._owners.get(key)
        if (owner is not None and owner != claim) or key in self._asked:
            # Also if the claim that asked no longer waits: a second lock in this session would need a second unlock.
            return Answer.BUSY
        self._owners[key] = claim
        if key in self._locked:
            self._idle.pop(key, None)
            return Answer.GRANTED
        self._asked.add(key)
        return Answer.ASK

    def owns(self, key: str, claim: str) -> bool:
        """Whether this claim is the owner of a key that the session has locked."""
        return self._owners.get(key) == claim and key in self._locked and key not in self._asked

    def hand_on(self, key: str, claim: str, to: str) -> bool:
        """The owner's claim is over, and the key's next row was claimed with its outcome. False: it did not own it."""
        if not self.owns(key, claim):
            return False
        self._owners[key] = to
        return True

    def free(self, key: str, claim: str, now: float) -> bool:
        """The claim no longer needs its key. False: it was not the owner. Safe to repeat."""
        if self._owners.get(key) != claim:
            return False
        del self._owners[key]
        if key in self._locked:
            self._idle[key] = now
        return True

    # -- called by the keeper

    def locked_among(self, wanted: Iterable[str]) -> set[str]:
        """Of the wanted keys, those that the session has locked: they were asked for during an unlock that was refused.

        They are granted without a lock statement: a second lock would need a second unlock, which is never sent.
        """
        return self._locked.intersection(wanted)

    def answered(self, key: str, *, got: bool, now: float) -> None:
        """The server's answer to a lock statement. The claim that asked may no longer wait."""
        self._asked.discard(key)
        if not got:
            self._owners.pop(key, None)  # only a reservation: nothing runs without the lock
            return
        self._locked.add(key)
        if key not in self._owners:
            self._idle[key] = now

    def take_idle(self, before: float) -> list[str]:
        """Keys to unlock now: idle since before that time. Removes them; call `unlocked` with the server's answer."""
        keys: list[str] = []
        for key, since in self._idle.items():
            if since > before:
                break
            keys.append(key)
        for key in keys:
            del self._idle[key]
            self._locked.discard(key)
        self._leaving = len(keys)
        return keys

    def unlocked(self, *, kept: Iterable[str], now: float) -> None:
        """The server's answer to an unlock statement. Keys that are still locked (`kept`) are unlocked later."""
        self._leaving = 0
        for key in kept:
            self._locked.add(key)
            if key not in self._owners:
                self._idle[key] = now

    def lost(self) -> None:
        """The session is gone, and every lock with it. Owners stay until they exit; reservations are dropped."""
        for key in self._asked:
            self._owners.pop(key, None)
        self._asked.clear()
        self._locked.clear()
        self._idle.clear()
        self._leaving = 0

    # -- for the keeper's timer and for statistics

    @property
    def next_idle(self) -> float | None:
        """When the key that is idle for longest became idle; None if no key is."""
        return next(iter(self._idle.values()), None)

    @property
    def locked(self) -> int:
        """Keys that the session has locked."""
        return len(self._locked) + self._leaving

    @property
    def owned(self) -> int:
        """Keys with an owner."""
        return len(self._owners)

    @property
    def asked(self) -> int:
        """Keys that the server is being asked for."""
        return len(self._asked)

    @property
    def idle(self) -> int:
        """Keys that are locked without an owner."""
        return len(self._idle)


@attrs.frozen(eq=False)
class Again:
    """When to offer a busy key's rows again. Replaced when something happens to the key, also during an offer."""

    at: float
    wait: float
    offers: int = 0
    """Offers since something last happened to the key."""


class BusyKeys:
    """Keys that a claim did not get, and when to offer their rows again.

    Without the offers a held row could wait for ever; without the back-off it would be picked and released in a loop.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: dict[str, Again] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def note(self, key: str, now: float) -> None:
        """A claim did not get this key; its row is released, held."""
        again = self._keys.get(key)
        wait = FIRST_OFFER if again is None else min(again.wait * 2.0, LONGEST_OFFER)
        self._keys[key] = Again(now + wait, wait)

    def got(self, key: str) -> None:
        """A claim got this key."""
        self._keys.pop(key, None)

    def hurry(self, key: str, now: float) -> None:
        """The owner on this node has exited: offer the key's rows now."""
        again = self._keys.get(key)
        if again is not None:
            self._keys[key] = Again(now, again.wait)

    def hurry_all(self, now: float) -> None:
        """There is a session again: keys may have been busy only because there was none."""
        for key in self._keys:
            self.hurry(key, now)

    def due(self, now: float) -> dict[str, Again]:
        """Keys to offer now."""
        return {key: again for key, again in self._keys.items() if again.at <= now}

    def offered(self, offers: Mapping[str, Again], now: float) -> None:
        """The keys of `due` were offered. If nothing happens to them they are offered again, a few times, then dropped.

        One offer is not enough: the release of the row that did not get its key may still be under way. Then a row
        behind it was offered, which the next pick holds again; or no row was offered, because there was none or it was
        locked.
        """
        for key, again in offers.items():
            if self._keys.get(key) is not again:
                continue  # a claim has asked for it meanwhile
            if again.offers + 1 < OFFERS:
                self._keys[key] = Again(now + again.wait, again.wait, again.offers + 1)
            else:
                del self._keys[key]  # another node has the key, or no row of it is held
