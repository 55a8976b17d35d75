"""Helpers for the engine's tests: nodes without an engine, whole engines, gates that hold their steps."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import attrs
import durable_actors as da
import psycopg
import pytest
import trio
import trio.testing
from durable_actors._engine import setup
from durable_actors._engine.claiming import feeder
from durable_actors._engine.claiming.at_once import ClaimsAtOnce
from durable_actors._engine.claims import ActiveClaim, ClaimState
from durable_actors._engine.keys.keeper import Keeper
from durable_actors._engine.keys.locks import Keys
from durable_actors._engine.lanes import lanes
from durable_actors._engine.maintenance import reaper
from durable_actors._engine.maintenance.failure_detector import Suspect
from durable_actors._engine.maintenance.reaper import Reaper
from durable_actors._engine.node import Node
from durable_actors._engine.running.dispatcher import Dispatcher
from durable_actors._postgres.pool.pool import open_pool
from durable_actors._store.claim import PickFrom, pick_instances
from durable_actors._store.rows import UNRECORDED, Claim, PickResult
from durable_actors.config import Config
from durable_actors.machine import ENDED, isolated_registry
from durable_actors.otp import ActorChild, Address, Supervisor, open_tree
from durable_actors.telemetry import Event, StepCommitted, StepStarted
from tests.kit import PATIENCE, Session, until

E = TypeVar("E")
_numbers = itertools.count(1)

with isolated_registry():

    class _M(da.Machine, name="m", initial="s"):
        @da.step
        async def s(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done()


SPEC = _M.__durable__
"""The machine of the rows that `Db.insert` makes."""

INSERT = "insert into durable.gen_durable ({}) values ({}) returning id"
QUICK: dict[str, Any] = {"poll_interval": 0.05, "max_poll_interval": 0.05, "node": "test"}
"""Frequent polls. Leases are long unless a test sets them."""
QUIET: dict[str, Any] = {"poll_interval": 60, "max_poll_interval": 60, "long_poll": 0, "node": "test"}
"""No polls while a test runs: only hints and due times start anything."""
REFUSE = """
create function refuse() returns trigger language plpgsql as $$
begin
    if new.result = '"bad"' and exists (select from rule) then
        raise exception 'not on a Monday' using errcode = (select code from rule);
    end if;
    return new;
end $$;
create table rule (code text);
create trigger refuse before update on durable.gen_durable for each row execute function refuse();
"""


REAP = """
update durable.gen_durable set status = 'runnable', attempt = attempt + 1, crashes = crashes + 1, locked_by = null,
       lease_expires_at = null, claim_id = null, claim_token_hash = null where id = %s
"""
"""Take the claim away from an instance, as a reaper does."""
END = (
    "update durable.gen_durable set status = 'failed', last_error = 'ended', finished_at = now(), locked_by = null,"
    " lease_expires_at = null, claim_id = null where id = %s"
)
"""End an instance while its step runs: the claim is gone."""


@attrs.frozen
class Db(Session):
    """A session in a database with the schema: rows made by hand, rows read back."""

    dsn: str

    def insert(self, **columns: object) -> int:
        columns = {"fsm": "m", "step": "s"} | columns
        query = INSERT.format(", ".join(columns), ", ".join(["%s"] * len(columns)))
        return self.value(query, *columns.values())

    def row(self, number: int, columns: str = "status, hold, attempt, crashes, claim_id, locked_by") -> tuple:
        [found] = self.execute(f"select {columns} from durable.gen_durable where id = %s", number)
        return found

    def locks(self) -> int:
        """How many session locks this database has."""
        return self.value(
            "select count(*) from pg_locks where locktype = 'advisory'"
            " and database = (select oid from pg_database where datname = current_database())"
        )


@asynccontextmanager
async def make_node(dsn: str, name: str | None = None, **options: Any) -> AsyncIterator[Node]:
    """A node with a pool of its own and no actors."""
    config = Config(dsn=dsn, **options)
    roles = lanes(config.pool_size, session_dsn=config.session_dsn, keepalive=config.lease_ttl)
    unique = {lane.name: lane for lane in roles.values()}
    async with open_pool(dsn, lanes=unique.values()) as pool:
        with isolated_registry(empty=False) as registry:
            registry.unregister("m", 1)  # another test's machine may have that name
            node = setup.make_node(config, pool, roles, {("m", 1): SPEC})
        node.owner = attrs.evolve(node.owner, name=name or f"node-{next(_numbers)}")
        yield node


def events_of(node: Node) -> list[Event]:
    """The events that the node emits from now on."""
    found: list[Event] = []
    node.telemetry.subscribe(found.append)
    return found


async def pick(node: Node, limit: int = 100, queue: str = "default") -> list[Claim]:
    """Claim what a feeder would claim."""
    async with node.pool.acquire(node.lane("claim")) as conn:
        picked = await pick_instances(
            conn,
            node.owner,
            queue=queue,
            limit=limit,
            known=node.catalog.array,
            begin=PickFrom([0], ["-infinity"], [0]),
            now=trio.current_time(),
        )
    return picked.claims


def claim(key: str | None, number: int = 1, **columns: Any) -> Claim:
    """A claim without a row: the keeper needs only its key and its id."""
    values: dict[str, Any] = {field.name: 0 for field in attrs.fields(Claim)} | {
        "cancellation": None,
        "recorded": UNRECORDED,
    }
    values |= {"id": number, "claim_id": f"{key}/{number}", "partition_key": key, "queue": "default"}
    return Claim(**(values | {"fsm": "m", "step": "s", "trusted_until": 1e9} | columns))


@attrs.frozen
class RunningReaper:
    """A reaper at work."""

    actor: Reaper
    address: Address[object]

    def look(self) -> None:
        """Have it look at once."""
        self.address.cast(None)

    def suspects(self) -> dict[str, Suspect]:
        return dict(self.actor._suspects.suspects)


@asynccontextmanager
async def reap(node: Node) -> AsyncIterator[RunningReaper]:
    """The node's reaper."""
    address: Address[object] = Address("reaper", capacity=1)
    actor = Reaper(node)
    async with open_tree(Supervisor("test", [ActorChild(address, lambda: actor)], intensity=0)):
        yield RunningReaper(actor, address)


def expire(db: Db, *numbers: int) -> None:
    query = "update durable.gen_durable set lease_expires_at = now() - interval '1 s' where id = any(%s)"
    db.execute(query, list(numbers))


@attrs.frozen
class Kept:
    """A node with its keeper running."""

    node: Node
    keys: Keys
    stop: Callable[[], Any]


@asynccontextmanager
async def keep(dsn: str, name: str | None = None, **options: Any) -> AsyncIterator[Kept]:
    """A node and its keeper, under a supervisor that restarts nothing."""
    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(make_node(dsn, name, **options))
        address: Address[object] = Address("keeper", capacity=1)
        keys = Keys(address)
        root = Supervisor("test", [ActorChild(address, lambda: Keeper(node, keys))], intensity=0)
        tree = await stack.enter_async_context(open_tree(root))
        yield Kept(node, keys, tree.stop)


class Recorder:
    """An observer that keeps every event of an engine, and waits for events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = trio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed = trio.Event()

    def all(self, kind: type[E], **fields: object) -> list[E]:
        """Events of this kind and with these fields that have happened already."""
        return [
            event
            for event in self.events
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def wait(self, kind: type[E], *, count: int = 1, **fields: object) -> E:
        """Wait until the `count`-th such event has happened, now or before; return it."""
        with trio.fail_after(PATIENCE):
            while True:
                changed = self._changed
                found = self.all(kind, **fields)
                if len(found) >= count:
                    return found[count - 1]
                await changed.wait()

    def started(self, number: int | None = None) -> list[StepStarted]:
        return self.all(StepStarted) if number is None else self.all(StepStarted, id=number)

    async def final(self, number: int) -> str:
        """Wait until this engine has ended the instance; return its status."""
        with trio.fail_after(PATIENCE):
            while True:
                changed = self._changed
                for event in self.all(StepCommitted, id=number):
                    if event.status in ENDED:
                        return event.status
                await changed.wait()


class Run:
    """An open engine and its events."""

    def __init__(self, engine: da.Engine, events: Recorder) -> None:
        self.engine = engine
        self.events = events

    async def insert(self, machine: Any, **options: Any) -> int:
        number = await self.engine.client.insert(machine, **options)
        assert number is not None
        return number

    async def insert_anyway(self, machine: Any, **options: Any) -> int:
        """Insert, and try again while the store is unavailable."""
        with trio.fail_after(PATIENCE):
            while True:
                try:
                    return await self.insert(machine, **options)
                except da.StoreUnavailable:
                    await trio.sleep(0.01)

    async def run(self, machine: Any, **options: Any) -> da.Instance:
        """Insert one, wait until it has ended or failed, and return it."""
        return await self.ended(await self.insert(machine, **options))

    async def ended(self, number: int) -> da.Instance:
        with contextlib.suppress(da.InstanceFailed):
            await self.engine.client.result(number, timeout=PATIENCE)
        return await self.engine.client.inspect(number)


@asynccontextmanager
async def running(dsn: str, **options: Any) -> AsyncIterator[Run]:
    """An engine with quick settings; options replace them."""
    events = Recorder()
    async with da.open_engine(**{"dsn": dsn, "observers": [events], **QUICK, **options}) as engine:
        yield Run(engine, events)


@asynccontextmanager
async def client_of(db: Db, **options: Any) -> AsyncIterator[da.Client]:
    """A client without an engine."""
    with trio.fail_after(PATIENCE):
        async with da.open_client(db.dsn, **options) as client:
            yield client


class Gate:
    """Holds steps, in tasks and in threads, until it is opened; counts the steps that have arrived."""

    def __init__(self) -> None:
        self.entered = 0
        self._event = trio.Event()
        self._open = trio.Event()
        self._thread_open = threading.Event()

    def arrive(self) -> None:
        self.entered += 1
        self._event.set()
        self._event = trio.Event()

    async def wait(self) -> None:
        """Arrive, and wait until the gate is opened."""
        self.arrive()
        await self._open.wait()

    def wait_in_thread(self, timeout: float = PATIENCE) -> None:
        trio.from_thread.run_sync(self.arrive)
        assert self._thread_open.wait(timeout)

    async def wait_entered(self, count: int = 1) -> None:
        with trio.fail_after(PATIENCE):
            while self.entered < count:
                await self._event.wait()

    def open(self) -> None:
        self._open.set()
        self._thread_open.set()


def gated(gate: Gate, name: str = "gated", *, runs: list[Any] | None = None, **options: Any) -> Any:
    """A machine whose only step waits at the gate, and ends with "finished"."""

    class M(da.Machine[Any], name=name, **options):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            if runs is not None:
                runs.append((ctx.id, ctx.attempt))
            await gate.wait()
            return da.Done("finished")

    return M


def simple(name: str = "simple", **options: Any) -> Any:
    """A machine whose only step ends at once, with `n` of its state."""

    class M(da.Machine[Any], name=name, **options):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            return da.Done(ctx.state.get("n"))

    return M


def collector() -> Any:
    """A machine that waits for the signal `stop`, then ends with the payloads of all other signals."""

    class Collector(da.Machine[dict[str, Any]], name="test.Collector"):
        @da.step
        async def start(self, ctx: da.Context[dict[str, Any]]) -> da.Outcome:
            if ctx.awaited:
                return da.Done([s.payload async for s in ctx.iter_signals() if s.name != "stop"])
            return da.Await("stop")

    return Collector


async def parked(run: Run, number: int, count: int = 1) -> None:
    """Wait until the instance awaits a signal, for the `count`-th time."""
    await run.events.wait(StepCommitted, id=number, status="awaiting_signal", count=count)


def active_claims(run: Run) -> list[ActiveClaim]:
    """The claims that the engine's node holds."""
    return list(run.engine._node.claims.all())


def dispatcher_of(run: Run, queue: str = "default") -> Dispatcher:
    """The dispatcher of a queue: the claims of its feeder, and its slots."""
    assert run.engine._parts is not None
    return run.engine._parts.dispatchers[queue]


def in_flight(run: Run) -> tuple[int, int]:
    """Slots that are taken in the default queue, and outcomes that wait for their commit without one."""
    dispatcher = dispatcher_of(run)
    return dispatcher.running, dispatcher.count(ClaimState.COMMITTING)


def state_of(run: Run, actor: str) -> str:
    """The state of an actor in the engine's tree."""
    [found] = [node for node in run.engine.snapshot().walk() if node.name == actor]
    return found.state


def restarts_of(run: Run, actor: str) -> int:
    """How often an actor in the engine's tree was started again."""
    [found] = [node for node in run.engine.snapshot().walk() if node.name == actor]
    return found.restarts


@contextmanager
def locked(dsn: str, number: int) -> Iterator[psycopg.Connection]:
    """Another session's transaction locks the row, so its outcome cannot be committed."""
    with psycopg.connect(dsn) as other:
        other.execute("select 1 from durable.gen_durable where id = %s for update", [number])
        yield other


class Picks:
    """What each pick of a feeder asked for by id, and what it claimed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_id: list[Sequence[int]] = []
        self.claimed: list[list[int]] = []
        real = feeder.pick_instances

        async def noted(*args: Any, **options: Any) -> PickResult:
            picked = await real(*args, **options)
            self.by_id.append(list(options["begin"].by_id))
            self.claimed.append([claim.id for claim in picked.claims])
            return picked

        monkeypatch.setattr(feeder, "pick_instances", noted)


def leave_to_the_feeder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test inserts or wakes through its engine is picked: the call itself claims nothing, at rest neither."""
    monkeypatch.setattr(ClaimsAtOnce, "begin", lambda *_: None)


def nobody_reaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No claim is taken back: a reaper may look after the end of a lease, before a commit that waits for a lock."""

    async def reap_some(*_: object, **__: object) -> int:
        return 0

    monkeypatch.setattr(reaper, "reap_some", reap_some)


async def at_rest(run: Run, queue: str = "default") -> None:
    """Until an insert into the queue would be claimed at once."""
    assert run.engine._parts is not None
    planner = run.engine._parts.planners[queue]
    await until(lambda: planner.drained and planner.queue_empty and not run.engine._node.claims.all())
    await trio.testing.wait_all_tasks_blocked()


def refuse_bad(db: Db, code: str) -> None:
    """A user's trigger refuses the result "bad" with this error code, until table `rule` is empty."""
    db.execute(REFUSE)
    db.execute("insert into rule values (%s)", code)


def saying(gate: Gate) -> Any:
    """A machine that waits at the gate and ends with what its state says."""

    class M(da.Machine[Any], name="m"):
        @da.step
        async def start(self, ctx: da.Context[Any]) -> da.Outcome:
            await gate.wait()
            return da.Done(ctx.state["say"])

        async def handle(self, error: Exception, ctx: da.Context[Any]) -> da.Outcome:
            return da.Stop(error)

    return M


class Away(logging.Handler):
    """A user's handler of log records that fails."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log server is away")


@contextmanager
def failing_log(level: int = logging.WARNING) -> Iterator[None]:
    """The engine's log has such a handler."""
    log, handler = logging.getLogger("durable_actors.engine"), Away(level)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
