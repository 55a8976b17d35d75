"""The keeper's queue: the keys that feeders want. Made before the keeper, and valid across its restarts."""

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

BUSY_KEY_PAUSES: Final = (0.005, 0.01, 0.02)
"""Seconds between attempts at a busy key: the node that has it commits first and unlocks a moment later."""
KEEPER_TIMEOUT: Final = 1.0
"""Seconds to wait for the keeper's answer. It usually takes one round trip. If it is overdue, no feeder waits for keys
until the keeper is back: feeders have other work."""
MAX_BATCH: Final = 1000
"""Keys per statement (1.9 µs each to lock), unless one caller alone wants more."""


@attrs.frozen
class KeyStatistics:
    """The keys of a node at one moment."""

    up: bool
    """The session is open; without it no key can be taken."""
    locked: int
    """Keys that the session has locked."""
    owned: int
    """Keys of running or buffered claims, and of threads that outlived the session."""
    idle: int
    """Keys that are locked without an owner, soon to be unlocked."""
    waiting: int
    """Keys that the server is being asked for."""
    contended: int
    """Keys that a claim did not get, whose rows are offered again from time to time."""


class Request:
    """Claims that want their keys, and the task that waits for the answer (None: it no longer waits)."""

    __slots__ = ("claims", "over", "task")

    def __init__(self, claims: list[Claim], task: Task) -> None:
        self.claims = claims
        self.task: Task | None = task
        self.over = False
        """The keeper has answered or dropped it; its task may no longer wait."""

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
    """Partition keys: taken before a step starts, freed when its task or thread has exited."""

    def __init__(self, wake: Address[object]) -> None:
        self._wake = wake
        self._requests: deque[Request] = deque()
        self._sent: list[Request] = []
        self.table = KeyTable()
        """The owner of each key. Only this object and the keeper use it."""
        self.busy = BusyKeys()
        """Keys whose rows are to be offered again. Only this object and the keeper use it."""
        self.up = False
        """The keeper has an open session."""
        self.losses = 0
        """How often claims may have lost keys that they owned."""
        self._silent = False  # an answer is overdue
        self._taking: set[str] = set()  # claims whose `take` is under way

    # -- for feeders and step tasks

    async def take(self, claims: list[Claim]) -> set[str]:
        """Take the keys of these claims; return the ids (`claim_id`) of the claims that own their key now.

        The keys of the others are busy, here or on another node, or there is no session: the caller releases these
        rows, held, and the keeper offers them again later. Tries for some 35 ms, but only once for a key that is known
        to be busy. Cancelled: none of these claims owns its key.
        """
        granted: set[str] = set()
        wanting = claims
        self._taking.update(each.claim_id for each in claims)
        try:
            for pause in (*BUSY_KEY_PAUSES, None):
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
        """Whether this claim owns its key now. False until `take` has returned: if cancelled, it frees the key again.

        This matters because a claim of the buffer may get a free slot while the feeder waits in `take`.
        """
        return claim.claim_id not in self._taking and self.table.owns(key_of(claim), claim.claim_id)

    def holds(self, claim: Claim) -> bool:
        """Whether the next step may begin on this claim: it has no key, or owns it and the session is not in doubt."""
        return claim.partition_key is None or (self.up and self.owns(claim))

    def hand_on(self, claim: Claim, to: Claim) -> bool:
        """The outcome of this claim is committed, and has claimed the next row of its key: that one owns the key now.

        False: the session was lost or is in doubt; then the new claim takes the key as any other does.
        """
        return self.up and self.table.hand_on(key_of(claim), claim.claim_id, to.claim_id)

    def free(self, claim: Claim) -> None:
        """The claim's task or thread has exited, or never started: free its key. Safe to repeat."""
        key = key_of(claim)
        now = trio.current_time()
        sleeps = not self.table.idle
        if not self.table.free(key, claim.claim_id, now):
            return
        self.busy.hurry(key, now)
        if sleeps and self.table.idle:
            self._wake.cast(None)  # while there were idle keys already, the keeper wakes soon anyway

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
        """One attempt. Cancelled: the requests are withdrawn; the caller must free what was granted."""
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
            with trio.move_on_after(KEEPER_TIMEOUT) as scope:
                granted |= await self._wait(request)
            # The answer may have come in the same turn of the scheduler, just after the time-out.
            self._silent = scope.cancelled_caught and not request.over
        return granted

    async def _wait(self, request: Request) -> set[str]:
        claims = request.claims
        self._requests.append(request)
        self._wake.cast(None)

        def abort(_: RaiseCancelT) -> Abort:
            request.task = None
            now = trio.current_time()
            for claim in claims:  # a lock that is under way will have no owner, and be idle
                self.table.free(key_of(claim), claim.claim_id, now)
            return Abort.SUCCEEDED

        granted: set[str] = await trio.lowlevel.wait_task_rescheduled(abort)
        return granted

    # -- for the keeper

    @property
    def pending(self) -> bool:
        """Whether there are requests to send."""
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
        """The session is open, or no longer in doubt."""
        self.up = True
        self.busy.hurry_all(trio.current_time())

    def lose(self) -> None:
        """The session is gone: answer every request with nothing. No key can be owned until there is a new one."""
        self.up = self._silent = False
        self.losses += 1
        self.table.lost()
        for request in (*self._sent, *self._requests):
            request.answer(set())
        self._sent.clear()
        self._requests.clear()

    def _refuse(self, request: Request) -> None:
        """Drop a request that was withdrawn before it was sent. The keeper was busy, and works again."""
        self._silent = False
        request.over = True
        for claim in request.claims:
            self.table.answered(key_of(claim), got=False, now=0.0)


def keys_of(requests: Iterable[Request]) -> list[str]:
    """The keys that these requests ask for, each once: the table refuses a second request for a key."""
    return [key_of(claim) for request in requests for claim in request.claims]
