"""A commander process: what operators do, at random, to instances that are there, while everything else goes on.

    python -m tests.chaos.commander --dsn ... --direct ... --seed 7 --seconds 5 --number 0 --effects FILE

Every attempt is written to an effect log before it is sent, and every answer when it has come
(`tests.invariants.commands` says how they are judged). A command is repeated with its idempotency key until it is
answered; some are sent twice at the same time, some again after their answer: each is carried out once.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, LiteralString

import attrs
import durable_actors as da
import psycopg
import trio
from durable_actors._bulk import Bulk
from durable_actors._client import Client
from durable_actors._store.pauses import pause_target
from tests.chaos import machines
from tests.chaos.workload import ALWAYS, default_level
from tests.invariants.effect_log import EffectLog
from tests.invariants.notes import ANSWERED, ASKED

CALL: Final = 3.0
"""Seconds for one attempt; then nobody knows, and it is repeated."""
AGAIN: Final = 0.1
"""Seconds between attempts."""
PAUSE: Final = (0.02, 0.25)
"""Seconds between two commands, least and most."""
INSIST: Final = 20.0
"""Seconds after the end of the faults for the last command to be answered."""
CANDIDATES: Final[LiteralString] = """
(select distinct on (status) id, status::text from durable.gen_durable order by status, random())
union all
(select id, status::text from durable.gen_durable where barrier is not null and finished_at is null
  order by random() limit 2)
"""
"""One instance of each status that there is (most have ended, and commands on those are refused), and two children."""
STARVED: Final[LiteralString] = """
select g.id from durable.gen_durable g
 where g.finished_at is null
   and (g.fsm in ('chaos.Hang', 'chaos.Loop')
        or g.fsm in ('chaos.Leaf', 'chaos.Undo', 'chaos.Tree', 'chaos.Rest') and g.cancellation is null
           and not exists (select 1 from durable.cascades)
        or g.fsm in ('chaos.Tally', 'chaos.Pack') and exists (
            select 1 from durable.receipts r where r.scope = 'instance' and r.target in (
                select c.id::text from durable.gen_durable c
                 where c.id = g.id
                    or c.unique_key = replace(convert_from(g.unique_key, 'utf8'), 'receiver:', 'courier:')::bytea)))
union all
select g.id from durable.gen_durable g
  join durable.graph e on e.id = g.id and not e.any_end
 where g.status = 'runnable' and g.hold = 5
   and exists (select 1 from durable.gen_durable n where n.id = any (e.needs) and n.status in ('failed', 'cancelled'))
   and not exists (select 1 from durable.untold)
"""
"""Who waits for what a command has prevented: signals that were refused while it was cancelled, or whose sender was;
who never ends, once nobody is left who cancels it with its parent; and who comes after a task that failed, and that
nobody retries."""

PAUSED: Final[LiteralString] = """
select id from durable.gen_durable where durable.is_paused(status, hold, request)
"""
"""Who was paused with many others, and is left so."""
ASKING: Final[LiteralString] = """
select id, manual ->> 'kind' from durable.gen_durable
 where status = 'awaiting_signal' and manual is not null and manual -> 'decision' is null order by random()
"""
"""Who waits for a person, and at what."""
REST: Final = (0.05, 0.8)
"""Seconds for which something is paused, least and most."""
QUEUES: Final = (("work", None), ("work", "chaos.Chain"), ("jobs", None), ("jobs", "chaos.job"), ("keys", None),
                 ("keys", "chaos.Lane"), ("work", "chaos.Desk"))  # fmt: skip
"""What is paused: queues, and machines in them."""
WAYS: Final = ("plain", "pause", "strict", "timeout")
"""Of desks; `tests.chaos.machines` has what they mean."""

RERUNNABLE: Final[LiteralString] = """
select id from durable.gen_durable
 where fsm in ('chaos.Chain', 'chaos.job', 'chaos.Sleeper') and rerun_of is null order by random() limit 1
"""
"""Who can be run once more without a parent, a key or a sender."""
BULKS: Final = (
    ("cancel", da.Filter(machine="chaos.Leaf", waiting="signal")),
    ("retry", da.Filter(machine="chaos.hopeless", status="failed")),
    ("pause", da.Filter(machine="chaos.Chain")),
    ("resume", da.Filter(paused=True)),
    ("cancel", da.Filter(machine="chaos.Tree")),
    ("run_now", da.Filter(queue="jobs")),
    ("retry", da.Filter(machine="chaos.Leaf", status="cancelled")),
    ("resume", da.Filter(everything=True)),
)
"""What is given to many."""

logger = logging.getLogger("chaos.commander")


@attrs.frozen(kw_only=True)
class Command:
    """One command on one instance."""

    name: str
    target: int
    key: str
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])

    @property
    def about(self) -> dict[str, Any]:
        """How the effect log names it."""
        return {"id": self.target, "command": self.name, "key": self.key, **self.options}

    async def send(self, client: Client) -> object:
        """Give it; returns the answer."""
        call: Callable[..., Awaitable[object]] = getattr(client, self.name)
        return await call(
            self.target, by="chaos", reason=f"chaos {self.key}", idempotency_key=self.key, **self.options
        )


@attrs.frozen(kw_only=True)
class QueueCommand:
    """A pause or a resume of a queue, or of a machine in it."""

    name: Literal["pause", "resume"]
    queue: str
    machine: str | None
    key: str
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])

    @property
    def target(self) -> str:
        return pause_target(self.queue, self.machine)

    @property
    def about(self) -> dict[str, Any]:
        """How the effect log names it."""
        return {"target": self.target, "command": self.name, "key": self.key, **self.options}

    async def send(self, client: Client) -> object:
        """Give it; returns which queue it was."""
        call = client.pause_queue if self.name == "pause" else client.resume_queue
        found = await call(
            self.queue, self.machine, by="chaos", reason="chaos", idempotency_key=self.key, **self.options
        )
        return pause_target(found.queue, found.machine)


def choose(rng: random.Random, status: str) -> tuple[str, dict[str, Any]]:
    """A command for an instance that was seen in this status, mostly one that fits."""
    fits = rng.random() < 0.85
    if (status in {"failed", "cancelled"}) == fits:
        return "retry", {}
    if (draw := rng.random()) < 0.35:
        return "pause", {}
    if draw < 0.55 and status == "runnable":
        return "run_now", {}
    return "cancel", {"force": rng.random() < 0.3, "children": rng.choice(("leave", "cancel"))}


class Orders:
    """Sends commands, and notes them."""

    def __init__(self, client: Client, log: EffectLog) -> None:
        self._client = client
        self._log = log

    async def give(self, command: Command | QueueCommand) -> object:
        """Send it until it is answered; None: it was refused."""
        about = command.about
        while True:
            self._log.note(ASKED, **about)
            try:
                with trio.fail_after(CALL):
                    answer = await command.send(self._client)
            except (da.Conflict, da.NoTarget, da.Duplicate) as exc:
                self._log.note(ANSWERED, **about, refused=type(exc).__name__)
                return None
            except (da.StoreUnavailable, trio.TooSlowError, psycopg.Error) as exc:
                logger.info("%s: %s; again", command, exc)
            else:
                self._log.note(ANSWERED, **about, answer=answer)
                return answer
            await trio.sleep(AGAIN)

    async def give_all(self, *commands: Command | QueueCommand) -> None:
        """Several callers at the same time."""
        async with trio.open_nursery() as nursery:
            for command in commands:
                nursery.start_soon(self.give, command)


class Commander:
    """One process's share of the commands."""

    def __init__(self, options: argparse.Namespace, client: Client, log: EffectLog) -> None:
        self._options = options
        self._client = client
        self._orders = Orders(client, log)
        self._rng = random.Random(f"commander {options.seed} {options.number}")
        self._keys = (f"{options.number}:{n}" for n in itertools.count())

    async def run(self) -> None:
        """Give commands until the time is over; the last ones are answered, too."""
        end = trio.current_time() + self._options.seconds
        with trio.move_on_at(end + INSIST) as scope:
            async with trio.open_nursery() as nursery:
                for loop in (
                    *(self._hang, self._desks, self._decide, self._pause_queues),
                    *(self._trees, self._bulks, self._reruns),
                ):
                    nursery.start_soon(loop, end)
                while trio.current_time() < end:
                    await trio.sleep(self._rng.uniform(*PAUSE))
                    await self._once(nursery)
        if scope.cancelled_caught:
            raise SystemExit("a command was not answered")

    async def _once(self, nursery: trio.Nursery) -> None:
        found = await trio.to_thread.run_sync(look, self._options.direct, CANDIDATES)
        if not found:
            return
        number, status = self._rng.choice(found)
        name, options = choose(self._rng, status)
        command = Command(name=name, target=number, key=next(self._keys), options=options)
        how = self._rng.random()
        if how < 0.15:
            await self._orders.give_all(command, command)
        else:
            await self._orders.give(command)
        if how > 0.9:
            await self._orders.give(command)
        if name == "pause":
            nursery.start_soon(self._resume, number)

    async def _resume(self, number: int) -> None:
        """After a while; whoever has not paused it is refused."""
        await trio.sleep(self._rng.uniform(*REST))
        await self._orders.give(Command(name="resume", target=number, key=next(self._keys)))

    async def _pause_queues(self, end: float) -> None:
        """One queue after the other, or a machine in it, for a moment; some pauses end by themselves."""
        while trio.current_time() < end:
            await trio.sleep(self._rng.uniform(*REST))
            queue, machine = self._rng.choice(QUEUES)
            rest = self._rng.uniform(*REST)
            until: dict[str, Any] = {"until": rest / 2} if self._rng.random() < 0.3 else {}
            pause, resume = (
                QueueCommand(name=name, queue=queue, machine=machine, key=next(self._keys), options=options)
                for name, options in (("pause", until), ("resume", dict[str, Any]()))
            )
            await self._orders.give_all(*([pause] * self._rng.choice((1, 1, 1, 2))))
            await trio.sleep(rest)
            await self._orders.give(resume)

    async def _desks(self, end: float) -> None:
        """Instances that ask people."""
        for n in itertools.count():
            await trio.sleep(self._rng.uniform(0.05, 0.3))
            if trio.current_time() > end:
                return
            way = WAYS[n % len(WAYS)]
            state = {"way": way, "timeout": self._rng.uniform(0.1, 1.5), "flops": self._rng.random() < 0.3}
            await self._insert(machines.Desk, f"desk:{way}:{self._options.number}:{n}", state)

    async def _decide(self, end: float) -> None:
        """Decide what is asked, at random; at times two do so at once, and one of them is refused."""
        while trio.current_time() < end:
            await trio.sleep(self._rng.uniform(*PAUSE))
            found = await trio.to_thread.run_sync(look, self._options.direct, ASKING)
            for number, kind in found[:2]:
                decisions = [self._decision(number, kind) for _ in range(self._rng.choice((1, 1, 2)))]
                await self._orders.give_all(*decisions)

    def _decision(self, number: int, kind: str) -> Command:
        name = "proceed" if kind == "pause" else self._rng.choice(("approve", "reject"))
        return decision(name, number, next(self._keys))

    async def _hang(self, end: float) -> None:
        """Instances that only a command ends: each is given one, here or on whichever node it runs by then."""
        for n in itertools.count():
            await trio.sleep(self._rng.uniform(0.1, 1.0))
            if trio.current_time() > end:
                return
            number = await self._insert(machines.Hang, f"hang:{self._options.number}:{n}", {})
            await trio.sleep(self._rng.uniform(0.0, 1.5))
            await self._orders.give(Command(name="cancel", target=number, key=next(self._keys)))

    async def _trees(self, end: float) -> None:
        """Families that only a command ends, whole; some are left to their children, or to what comes afterwards."""
        await self._insert(machines.Loop, f"loop:{self._options.number}", {"n": 0})
        for n in itertools.count():
            await trio.sleep(self._rng.uniform(0.2, 1.0))
            if trio.current_time() > end:
                return
            machine = (machines.Tree, machines.Rest, machines.Undo)[n % 3]
            state = {"levels": self._rng.randint(0, 2), "how": self._rng.choice(("hangs", "waits"))}
            state["flops"] = self._rng.random() < 0.5
            key = f"{machine.__name__.lower()}:{self._options.number}:{n}"
            number = await self._insert(machine, key, state)
            await trio.sleep(self._rng.uniform(0.0, 1.0))
            if machine is not machines.Rest or self._rng.random() < 0.3:
                how = {"children": "cancel", "force": self._rng.random() < 0.1}
                await self._orders.give(
                    Command(name="cancel", target=number, key=next(self._keys), options=how)
                )

    async def _reruns(self, end: float) -> None:
        """New instances from old ones, some asked for twice at the same time with the same key."""
        while trio.current_time() < end:
            await trio.sleep(self._rng.uniform(0.1, 0.6))
            for (number,) in await trio.to_thread.run_sync(look, self._options.direct, RERUNNABLE):
                again = Command(name="rerun", target=number, key=next(self._keys))
                await self._orders.give_all(*[again] * self._rng.choice((1, 1, 2)))

    async def _bulks(self, end: float) -> None:
        """One command on many, in this process or on a worker, which may be killed; asked for until it is answered."""
        for n in itertools.count():
            await trio.sleep(self._rng.uniform(0.3, 1.2))
            if trio.current_time() > end:
                return
            name, where = BULKS[n % len(BULKS)]
            key, background = f"bulk {self._options.number}:{n}", self._rng.random() < 0.5
            how = {"children": "cancel"} if name == "cancel" else {}
            call: Callable[..., Awaitable[Bulk]] = getattr(self._client, name)
            while True:
                try:
                    with trio.fail_after(2 * CALL):
                        bulk = await call(
                            where=where, by="chaos", idempotency_key=key, background=background, **how
                        )
                        if self._rng.random() < 0.2:
                            await bulk.abort()
                        await bulk.refresh()
                    break
                except (da.StoreUnavailable, trio.TooSlowError, psycopg.Error, da.NoTarget) as exc:
                    logger.info("%s of many: %s; again", name, exc)
                    if isinstance(exc, da.NoTarget):  # retention has deleted what did it
                        break
                await trio.sleep(AGAIN)

    async def _insert(self, machine: type[machines.Base], key: str, state: dict[str, Any]) -> int:
        return await self._insist(
            partial(
                self._client.insert,
                machine,
                state=state,
                unique_key=key,
                unique_scope=ALWAYS,
                on_duplicate="return",
                journal=default_level(self._options.seed),
            )
        )

    async def _insist(self, call: Callable[[], Awaitable[int]]) -> int:
        while True:
            try:
                with trio.fail_after(CALL):
                    return await call()
            except (da.StoreUnavailable, trio.TooSlowError, psycopg.Error) as exc:
                logger.warning("insert: %s; again", exc)
            await trio.sleep(AGAIN)


def decision(name: str, number: int, key: str) -> Command:
    """What a person decides; comment and data tell which decision it was."""
    return Command(name=name, target=number, key=key, options={"comment": f"key {key}", "data": {"key": key}})


def look(dsn: str, query: LiteralString) -> list[tuple[Any, ...]]:
    """What there is now, by the direct way; nothing if there is no way."""
    try:
        with psycopg.connect(dsn, autocommit=True, application_name="chaos", connect_timeout=2) as conn:
            return conn.execute(query).fetchall()
    except psycopg.Error:
        return []


async def serve(options: argparse.Namespace) -> None:
    """Connect, and command."""
    log = EffectLog(options.effects)
    async with AsyncExitStack() as stack:
        client = None
        while client is None:
            try:
                client = await stack.enter_async_context(da.open_client(options.dsn))
            except (da.StoreUnavailable, psycopg.Error):
                await trio.sleep(AGAIN)
        await Commander(options, client, log).run()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--direct", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--effects", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    trio.run(serve, options)


if __name__ == "__main__":
    main()
