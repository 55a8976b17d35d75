"""The keeper's queue: what feeders and step tasks ask of it. Made before it, and valid across its restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

import attrs
import outcome
import trio
from trio.lowlevel import Abort, RaiseCancelT, Task

from durable_actors._engine.keys.table import Answer, BusyKeys, KeyTable
from durable_actors._store.rows import Claim
from durable_actors.otp import Address

RETRIES: Final = (0.005, 0.01, 0.02)
"""Seconds between attempts at a busy key: a node that hands it over commits first and unlocks a moment later."""
PATIENCE: Final = 1.0
"""Seconds to wait for the keeper's answer; it has one in a round trip, unless the network is stuck. Then nobody waits
any more until it is back: the feeder that asks has other work."""
MAX_BATCH: Final = 1000
"""Keys per statement (1.9 µs each to lock), unless one caller alone brings more."""


@attrs.frozen
class KeyStatistics:
    """The keys of a node at one moment."""

    up: bool
    """The session is there; without it no key can be taken."""
    locked: int
    """Locked by the session."""
    owned: int
    """Of a running or buffered claim, or of a thread that has outlived its session."""
    idle: int
    """Locked without an owner, soon to be unlocked."""
    waiting: int
    """Being asked for at the server."""
    contended: int
    """Keys that a claim did not get, whose rows are offered again from time to time."""


class Request:
    """Claims that want their keys, and the task that waits for the answer (None once it has gone)."""

    __slots__ = ("claims", "over", "task")

    def __init__(self, claims: list[Claim], task: Task) -> None:
        self.claims = claims
        self.task: Task | None = task
        self.over = False
        """The keeper is done with it; whoever asked may have gone before."""

    def answer(self, granted: set[str]) -> None:
        self.over = True
        task, self.task = self.task, None
        if task is not None:
            trio.lowlevel.reschedule(task, outcome.Value(granted))


def key_of(claim: Claim) -> str:
    """The key of a claim that has one."""
    assert claim.partition_key is not None
    return claim.partition_key


class Keys:
    """Partition keys: taken before a step starts, freed when its task or thread has really exited."""

    def __init__(self, wake: Address[object]) -> None:
        self._wake = wake
        self._requests: deque[Request] = deque()
        self._sent: list[Request] = []
        self.table = KeyTable()
        """Who has which key; the keeper's and this object's alone."""
        self.busy = BusyKeys()
        """Keys whose rows are to be offered again; the keeper's and this object's alone."""
        self.up = False
        """The keeper has its session."""
        self._silent = False  # an answer is overdue
        self._taking: set[str] = set()  # claims whose `take` is under way

    # -- for feeders and step tasks

    async def take(self, claims: list[Claim]) -> set[str]:
        """Take the keys of these claims; return the ids (`claim_id`) of those who have theirs now.

        The others found it busy, here or elsewhere, or the session is away: their rows go back held, and the keeper
        offers them again by and by. Tries for some 35 ms, but only once for a key that is known to be busy. Cancelled:
        none of these claims has its key.
        """
        granted: set[str] = set()
        wanting = claims
        self._taking.update(each.claim_id for each in claims)
        try:
            for pause in (*RETRIES, None):
                granted |= await self._try(wanting)
                wanting = [each for each in wanting if each.claim_id not in granted]
                again = [each for each in wanting if key_of(each) not in self.busy]
                if pause is None or not again:
                    break
                wanting = again
                await trio.sleep(pause)
        except BaseException:
            for claim in claims:
                self.free(claim)
            raise
        finally:
            self._taking.difference_update(each.claim_id for each in claims)
        now = trio.current_time()
        for claim in claims:
            if claim.claim_id in granted:
                self.busy.got(key_of(claim))
            else:
                self.busy.note(key_of(claim), now)
        return granted

    def owns(self, claim: Claim) -> bool:
        """Whether this claim has its key now. Not before `take` is over: cancelled, it frees what it was granted.

        A step that ends hands its slot to a claim of the buffer while the feeder waits in `take`.
        """
        return claim.claim_id not in self._taking and self.table.owns(key_of(claim), claim.claim_id)

    def holds(self, claim: Claim) -> bool:
        """Whether a step of this claim may begin after another one: it has no key, or its own beyond doubt."""
        return claim.partition_key is None or (self.up and self.owns(claim))

    def free(self, claim: Claim) -> None:
        """The task or thread that had the key has exited, or never started. Safe to repeat."""
        key = key_of(claim)
        now = trio.current_time()
        sleeps = not self.table.idle
        if not self.table.free(key, claim.claim_id, now):
            return
        self.busy.hurry(key, now)
        if sleeps and self.table.idle:
            self._wake.cast(None)  # with idle keys it is awake soon anyway

    def statistics(self) -> KeyStatistics:
        """The keys now."""
        return KeyStatistics(
            up=self.up,
            locked=self.table.locked,
            owned=self.table.owned,
            idle=self.table.idle,
            waiting=self.table.asked,
            contended=len(self.busy),
        )

    async def _try(self, claims: list[Claim]) -> set[str]:
        """One attempt. Cancelled: its requests are withdrawn; what was granted is the caller's to free."""
        granted: set[str] = set()
        if not self.up or self._silent:
            return granted
        asking: list[Claim] = []
        for claim in claims:
            match self.table.ask(key_of(claim), claim.claim_id):
                case Answer.GRANTED:
                    granted.add(claim.claim_id)
                case Answer.ASK:
                    asking.append(claim)
                case Answer.BUSY:
                    pass
        if asking:
            request = Request(asking, trio.lowlevel.current_task())
            with trio.move_on_after(PATIENCE) as scope:
                granted |= await self._wait(request)
            # The answer may have come in this very turn, when it was no longer waited for.
            self._silent = scope.cancelled_caught and not request.over
        return granted

    async def _wait(self, request: Request) -> set[str]:
        claims = request.claims
        self._requests.append(request)
        self._wake.cast(None)

        def abort(_: RaiseCancelT) -> Abort:
            request.task = None
            now = trio.current_time()
            for claim in claims:  # a lock that is under way will find no owner, and be idle
                self.table.free(key_of(claim), claim.claim_id, now)
            return Abort.SUCCEEDED

        granted: set[str] = await trio.lowlevel.wait_task_rescheduled(abort)
        return granted

    # -- for the keeper

    @property
    def pending(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._requests)

    def collect(self) -> list[Request]:
        """The next requests to send, about `MAX_BATCH` keys. Those that were withdrawn are dropped."""
        count = 0
        while self._requests and count < MAX_BATCH:
            request = self._requests.popleft()
            if request.task is None:
                self._refuse(request)
            else:
                count += len(request.claims)
                self._sent.append(request)
        return self._sent

    def answer(self, locked: set[str]) -> None:
        """The server's answer to what was collected."""
        now = trio.current_time()
        self._silent = False
        sent, self._sent = self._sent, []
        for request in sent:
            granted: set[str] = set()
            for claim in request.claims:
                got = key_of(claim) in locked
                self.table.answered(key_of(claim), got=got, now=now)
                if got:
                    granted.add(claim.claim_id)
            request.answer(granted)

    def opened(self) -> None:
        """The session is there."""
        self.up = True
        self.busy.hurry_all(trio.current_time())

    def lose(self) -> None:
        """The session is gone: whoever waits gets nothing, and nobody owns anything until it is back."""
        self.up = self._silent = False
        self.table.lost()
        for request in (*self._sent, *self._requests):
            request.answer(set())
        self._sent.clear()
        self._requests.clear()

    def _refuse(self, request: Request) -> None:
        """Withdrawn before it was sent: the keeper was busy with something else, and is no longer."""
        self._silent = False
        request.over = True
        for claim in request.claims:
            self.table.answered(key_of(claim), got=False, now=0.0)


def keys_of(requests: Iterable[Request]) -> list[str]:
    """The keys that these requests ask for; the table lets nobody ask for one twice."""
    return [key_of(claim) for request in requests for claim in request.claims]
