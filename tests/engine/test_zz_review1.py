from __future__ import annotations
import contextvars
import durable_actors as da
import psycopg, pytest, trio
from durable_actors._engine import flusher, step_task
from durable_actors._engine.settling import Settling
from durable_actors.telemetry import *
from tests.engine.engine_kit import QUICK, QUIET, Gate, Run, running, until
from tests.engine.test_refusals import TRIGGER, define
from tests.engine.test_left import locked, held, gated

pytestmark = pytest.mark.usefixtures("registry")


async def test_t1_neighbours_of_a_failed_settle(durable_dsn, db, monkeypatch):
    told = Settling.committed
    crash = True
    def crashes(self, ran, held, verdict):
        nonlocal crash
        if crash:
            crash = False
            raise RuntimeError("a bug")
        told(self, ran, held, verdict)
    monkeypatch.setattr(Settling, "committed", crashes)
    gate = Gate()
    job = gated(gate)
    class M(da.Machine, name="mm"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Next(self.second)
        @da.step
        async def second(self, ctx):
            return da.Done("x")
    async with running(durable_dsn, lease_ttl=3) as run:
        nums = [await run.insert(job, args={}) for _ in range(3)]
        m = await run.insert(M, state={})
        await gate.wait_entered(4)
        gate.open()
        await until(lambda: not crash)
        t = trio.current_time()
        row = await run.ended(m)
        print("machine", row.status, row.attempt, row.crashes if hasattr(row, "crashes") else "", trio.current_time() - t)
        print("stale", run.events.all(OutcomeStale))
        print([db.row(n, "status, attempt") for n in nums])
    assert not run.events.all(OutcomeStale)


async def test_t2_drain_two_locked(durable_dsn, db):
    gate = Gate()
    job = gated(gate)
    async with running(durable_dsn, drain_timeout=1.5) as run:
        a = await run.insert(job, args={}); b = await run.insert(job, args={})
        await gate.wait_entered(2)
        with locked(durable_dsn, a), locked(durable_dsn, b) as other:
            gate.open()
            await run.events.wait(StepStopped, id=a)
            await run.events.wait(StepStopped, id=b)
            await trio.sleep(0.6)
            run.engine.request_stop()
            await until(lambda: not run.engine._node.feeders["default"].claimed._pool._accepting)
            await trio.sleep(0.1)
            other.rollback()
            await trio.sleep(2.2)
    print("a", db.row(a, "status, attempt"), "b", db.row(b, "status, attempt"))
    assert db.row(b, "status, attempt") == ("done", 0)


async def test_t3_drain_refused_blocks(durable_dsn, db):
    db.execute(TRIGGER)
    db.execute("insert into rule values ('57014')")
    gate = Gate()
    machine = define(gate)
    async with running(durable_dsn, drain_timeout=1.5) as run:
        bad = await run.insert(machine, state={"say": "bad"})
        good = await run.insert(machine, state={"say": "good"})
        await gate.wait_entered(2)
        with locked(durable_dsn, good) as other:
            gate.open()
            await run.events.wait(StepStopped, id=bad)
            await run.events.wait(StepStopped, id=good)
            await trio.sleep(1.0)
            run.engine.request_stop()
            await until(lambda: not run.engine._node.feeders["default"].claimed._pool._accepting)
            other.rollback()
    print("bad", db.row(bad, "status, attempt"), "good", db.row(good, "status, attempt"))
    assert db.row(good, "status, attempt") == ("done", 0)


class Odd:
    def __eq__(self, other):
        raise ValueError("The truth value of an array is ambiguous")
    __hash__ = None


var: contextvars.ContextVar[object] = contextvars.ContextVar("odd")


async def test_t4_context_eq(durable_dsn, db):
    ran = 0
    @da.job(name="odd")
    async def job(args):
        nonlocal ran
        ran += 1
        var.set(Odd())
        return 1
    token = var.set(Odd())
    async with running(durable_dsn, lease_ttl=1, heartbeat_interval=0.2, reap_interval=0.3) as run:
        n = await run.insert(job, args={})
        await trio.sleep(4)
        print("ran", ran, db.row(n, "status, attempt, crashes"))
        ok = db.row(n, "status") == ("done",)
    var.reset(token)
    assert ok


async def test_t5_take_back_lost(durable_dsn, db, monkeypatch):
    """Lost while the refused commit is under way: handle runs all the same."""
    real = flusher.commit_outcomes
    handled = []
    node = None
    async def lost_meanwhile(*a, **k):
        try:
            return await real(*a, **k)
        finally:
            for h in node.leases.everything():
                node.leases.lose(h, "another worker has claimed it")
    monkeypatch.setattr(flusher, "commit_outcomes", lost_meanwhile)
    db.execute(TRIGGER); db.execute("insert into rule values ('P0001')")
    class M(da.Machine, name="m5"):
        @da.step
        async def start(self, ctx):
            return da.Done("bad")
        async def handle(self, error, ctx):
            handled.append(repr(error))
            await trio.sleep(0.5)
            handled.append("ran on")
            return da.Stop(error)
    async with running(durable_dsn, **QUIET) as run:
        node = run.engine._node
        n = await run.insert(M, state={})
        await trio.sleep(1.5)
        print(handled, run.events.all(ClaimLost), db.row(n, "status"))
    assert not handled


async def test_t5b_take_back_without_key(durable_dsn, db):
    db.execute(TRIGGER); db.execute("insert into rule values ('P0001')")
    gate = Gate()
    owned = []
    class M(da.Machine, name="m5"):
        @da.step
        async def start(self, ctx):
            await gate.wait()
            return da.Done("bad")
        async def handle(self, error, ctx):
            node = run.engine._node
            [h] = held(run)
            owned.append(node.feeders["default"].claimed._keys.owns(h.claim))
            return da.Stop(error)
    async with running(durable_dsn, **QUIET) as run:
        n = await run.insert(M, state={}, partition_key="k")
        await gate.wait_entered()
        keys = run.engine._node.feeders["default"].claimed._keys
        with locked(durable_dsn, n):
            gate.open()
            await run.events.wait(StepStopped, id=n)
            await until(lambda: held(run)[0].left)
            db.execute("select pg_terminate_backend(pid) from pg_locks where locktype='advisory'")
            await until(lambda: not keys.table.locked)
        await trio.sleep(1)
        print("owned in handle", owned, db.row(n, "status, attempt"))
    assert owned != [False]


async def test_t6_resolve_fails_after_commit(durable_dsn, db, monkeypatch):
    real, realread, realprobe = flusher.commit_outcomes, flusher.read_claims, flusher.probe_locks
    calls = 0; reads = 0; probes = 0
    gate2 = trio.Event()
    async def commit(conn, schema, transitions, **k):
        nonlocal calls
        calls += 1
        print("commit", calls, [t.claim.id for t in transitions])
        if calls == 1:
            await real(conn, schema, transitions, **k)
            raise da.CommitUnknown("x")
        if calls == 2:
            raise psycopg.errors.LockNotAvailable("l")
        r = await real(conn, schema, transitions, **k)
        print("  ->", r.committed)
        return r
    async def probe(conn, schema, ids):
        if not gate2.is_set():
            return set()
        return await realprobe(conn, schema, ids)
    async def read(*a, **k):
        nonlocal reads
        reads += 1
        if reads == 1:
            raise da.StoreUnavailable("away")
        return await realread(*a, **k)
    monkeypatch.setattr(flusher, "commit_outcomes", commit)
    monkeypatch.setattr(flusher, "probe_locks", probe)
    monkeypatch.setattr(flusher, "read_claims", read)
    gate = Gate(); gate_b = Gate()
    @da.job(name="a")
    async def ja(args): return "a"
    @da.job(name="b")
    async def jb(args):
        await gate_b.wait()
        return "b"
    async with running(durable_dsn) as run:
        b = await run.insert(jb, args={})
        await gate_b.wait_entered()
        a = await run.insert(ja, args={})
        await until(lambda: calls == 2)
        await trio.sleep(0.05)
        # queue both into one batch
        real_take = run.engine._node.feeders["default"].claimed._commits.take
        commits = run.engine._node.feeders["default"].claimed._commits
        orig = type(commits).take
        def take(self, most):
            return [] if len(self.entries) < 2 and calls == 2 else orig(self, most)
        monkeypatch.setattr(type(commits), "take", take)
        gate_b.open()
        gate2.set()
        with trio.move_on_after(3):
            while db.row(b, "status") != ("done",): await trio.sleep(0.02)
        await trio.sleep(1.5)
        print("stale", [e.id for e in run.events.all(OutcomeStale)], "a,b", a, b, db.row(b, "status"))
    assert not run.events.all(OutcomeStale)
