"""Who has which partition key on this node. Pure state: no clock, no I/O; time is an argument.

The session's locks are re-entrant: Postgres would give a key twice to one session. So the node keeps its own account.
A key is here

    locked by the session?   has an owner?
    no                       no             unknown: not in the table
    being asked for          yes            reserved, nobody else here may ask
    yes                      yes            a step runs under it
    yes                      no             idle: the next taker here gets it without SQL; else it is unlocked soon
    no                       yes            the session was lost, and the task or thread has not exited yet

An owner is a claim, and only that claim (by its id) frees the key. Exactly one lock and one unlock go to the server
per stay in the table.
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
"""So often a key is offered without being met again."""


class Answer(enum.Enum):
    """What a claim that asks for its key hears."""

    GRANTED = enum.auto()
    """It is the owner now; no SQL needed."""
    ASK = enum.auto()
    """Reserved for it; the server must be asked."""
    BUSY = enum.auto()
    """Another claim of this node has it."""


class KeyTable:
    """The keys of one node."""

    __slots__ = ("_asked", "_idle", "_leaving", "_locked", "_owners")

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._locked: set[str] = set()
        self._asked: set[str] = set()  # a lock statement for it is queued or under way
        self._idle: dict[str, float] = {}  # locked without an owner, since when; oldest first
        self._leaving = 0  # keys whose unlock statement is under way

    # -- asked by claims

    def ask(self, key: str, claim: str) -> Answer:
        """A claim wants its key."""
        owner = self._owners.get(key)
        if (owner is not None and owner != claim) or key in self._asked:
            # Also when whoever asked has gone: a second lock in this session would need a second unlock.
            return Answer.BUSY
        self._owners[key] = claim
        if key in self._locked:
            self._idle.pop(key, None)
            return Answer.GRANTED
        self._asked.add(key)
        return Answer.ASK

    def owns(self, key: str, claim: str) -> bool:
        """Whether this claim is the owner of a key that the session has locked, and knows it."""
        return self._owners.get(key) == claim and key in self._locked and key not in self._asked

    def free(self, key: str, claim: str, now: float) -> bool:
        """The claim needs its key no more; tell whether it had it. Repeating it changes nothing."""
        if self._owners.get(key) != claim:
            return False
        del self._owners[key]
        if key in self._locked:
            self._idle[key] = now
        return True

    # -- told by the session

    def locked_among(self, wanted: Iterable[str]) -> set[str]:
        """Of keys that were asked for, those that the session has: their unlock was under way then, and was refused.

        They are granted without a lock statement: a second lock would need a second unlock, which nobody would send.
        """
        return self._locked.intersection(wanted)

    def answered(self, key: str, *, got: bool, now: float) -> None:
        """The server's answer to a lock statement. Whoever asked may have gone meanwhile."""
        self._asked.discard(key)
        if not got:
            self._owners.pop(key, None)  # only a reservation: nothing runs without the lock
            return
        self._locked.add(key)
        if key not in self._owners:
            self._idle[key] = now

    def take_idle(self, before: float) -> list[str]:
        """Keys to unlock now: idle since before that time. They are out of the table; `unlocked` ends it."""
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
        """The server's answer to an unlock statement. Those that it kept are unlocked later."""
        self._leaving = 0
        for key in kept:
            self._locked.add(key)
            if key not in self._owners:
                self._idle[key] = now

    def lost(self) -> None:
        """The session is gone, and every lock with it. Owners stay until they exit; reservations are void."""
        for key in self._asked:
            self._owners.pop(key, None)
        self._asked.clear()
        self._locked.clear()
        self._idle.clear()
        self._leaving = 0

    # -- for the keeper's clock and for people

    @property
    def next_idle(self) -> float | None:
        """Since when the oldest idle key is; None when there is none."""
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
        """Keys that are locked and have no owner."""
        return len(self._idle)


@attrs.frozen(eq=False)
class Again:
    """When to offer a busy key's rows again. News about the key replace it: an offer under way is about the old one."""

    at: float
    wait: float
    offers: int = 0
    """Made since the last news."""


class BusyKeys:
    """Keys that a claim did not get, and when to offer their rows again.

    Offering is what keeps a held row from waiting for ever; backing off is what keeps it from spinning.
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: dict[str, Again] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def note(self, key: str, now: float) -> None:
        """A claim did not get this key; its row goes back, held."""
        again = self._keys.get(key)
        wait = FIRST_OFFER if again is None else min(again.wait * 2.0, LONGEST_OFFER)
        self._keys[key] = Again(now + wait, wait)

    def got(self, key: str) -> None:
        """A claim got it."""
        self._keys.pop(key, None)

    def hurry(self, key: str, now: float) -> None:
        """Its holder here has exited: offer its rows now."""
        again = self._keys.get(key)
        if again is not None:
            self._keys[key] = Again(now, again.wait)

    def hurry_all(self, now: float) -> None:
        """The session is back: what was busy only for want of it should not wait."""
        for key in self._keys:
            self.hurry(key, now)

    def due(self, now: float) -> dict[str, Again]:
        """Keys to offer now."""
        return {key: again for key, again in self._keys.items() if again.at <= now}

    def offered(self, offers: Mapping[str, Again], now: float) -> None:
        """What `due` gave was offered. Without news it is offered again, a few times, and then forgotten.

        Not once: the row that did not get its key may still be on its way back. Then a row behind it was offered, and
        is held again by the next pick; or nothing was, or it was locked.
        """
        for key, again in offers.items():
            if self._keys.get(key) is not again:
                continue  # met again meanwhile, or got
            if again.offers + 1 < OFFERS:
                self._keys[key] = Again(now + again.wait, again.wait, again.offers + 1)
            else:
                del self._keys[key]  # another node has it, or nothing waits for it
