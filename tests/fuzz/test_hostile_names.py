"""No row can make a worker import or run what was not registered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import durable_actors as da
import pytest
from durable_actors.errors import InvalidOutcome
from durable_actors.machine import current_registry, normalize_outcome, plan_insert
from hypothesis import given
from tests.fuzz.kit import QUEUE, add, any_text, engine, fuzz
from tests.kit import Session

pytestmark = pytest.mark.usefixtures("registry")

MODULE = "tests.fuzz.trap"
"""Importing it would leave a mark: the module itself."""

MACHINES = [
    MODULE,
    f"{MODULE}:Trap",
    f"{MODULE}.Trap",
    f"{MODULE}:Trap.run",
    "os.system",
    "os:system",
    "subprocess:run",
    "builtins",
    "builtins:eval",
    "__main__",
    "__import__('os')",
    "durable_actors.machine:Machine",
    "tests.fuzz.test_hostile_names:traps",
    "__class__",
    "__init__",
    "registered/1",
    "registered:Base",
    "../../etc/passwd",
    "registered\n",
    " registered",
    "REGISTERED",
    "registered.plain",
    "${jndi:ldap://x}",
    "{0.__class__}",
    "%s",
    "",
]

STEPS = [
    "__init__",
    "__class__",
    "__call__",
    "__dict__",
    "__init_subclass__",
    "__del__",
    "__reduce__",
    "__getattribute__",
    "run",
    "state",
    "handle",
    "perform",
    "spec",
    "name",
    "queue",
    "start.__call__",
    "start.func",
    "inherited",
    "_private",
    "plain",
    "trap",
    "classy",
    "static",
    "nested",
    "Nested",
    "constant",
    "Start",
    " start",
    "start\n",
    "start ",
    "stärt",
    "__doc__",
    "__module__",
    "mro",
    "register",
    "ctx",
    "self",
    "lambda: 0",
    "0",
    "",
]


class Traps:
    """What a machine's class has beside its steps; touching any of it is noted."""

    def __init__(self) -> None:
        ran: list[str] = []
        self.ran = ran

        class Base:
            def inherited(self, ctx: Any = None) -> None:
                ran.append("inherited")

        class M(da.Machine, Base, name="registered", queue=QUEUE):
            constant = 5

            class Nested:
                def __call__(self, *args: Any) -> None:
                    ran.append("Nested")

            nested = Nested()

            @da.step
            async def start(self, ctx: Any) -> da.Outcome:
                ran.append("start")
                return da.Done("ran")

            async def _private(self, ctx: Any) -> None:
                ran.append("_private")

            async def plain(self, ctx: Any) -> None:
                ran.append("plain")

            @property
            def trap(self) -> Any:
                ran.append("trap")
                return self.start

            @classmethod
            def classy(cls, ctx: Any) -> None:
                ran.append("classy")

            @staticmethod
            def static(ctx: Any) -> None:
                ran.append("static")

        self.machine = M


_heard: list[tuple[str, str]] | None = None
_FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen")


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _heard is not None and (event == "import" or event in _FORBIDDEN):
        _heard.append((event, str(args[0])))


sys.addaudithook(_hook)  # for good: Python cannot take one out; it does nothing unless somebody listens


@contextmanager
def listening() -> Iterator[list[tuple[str, str]]]:
    """What the interpreter itself says of imports and processes, whoever asks for them."""
    global _heard
    found: list[tuple[str, str]] = []
    _heard = found
    try:
        yield found
    finally:
        _heard = None


async def test_no_row_makes_a_worker_import_or_run_anything(durable_dsn, conn):
    traps = Traps()
    steps = [*STEPS, *sorted(set(dir(traps.machine)) - {"start"})]
    numbers = {add(conn, queue=QUEUE, fsm="registered", step=step): step for step in steps}
    woken = {
        add(
            conn, queue=QUEUE, fsm="registered", step="start", status="awaiting_signal", awaits="{go}", await_step=step,
            await_deadline="-infinity",
        ): step
        for step in steps
    }  # fmt: skip
    shelved = [add(conn, queue=QUEUE, fsm=fsm, step=step) for fsm in MACHINES for step in ("start", "run")]
    good = add(conn, queue=QUEUE, fsm="registered", step="start")
    sys.modules.pop(MODULE, None)
    with listening() as heard:
        async with engine(durable_dsn):
            assert await da.result(good, timeout=30) == "ran"
            await Session(conn).eventually(
                "select not exists (select 1 from durable.gen_durable where status = 'runnable' and hold = 0)",
            )
            await Session(conn).eventually(
                "select not exists (select 1 from durable.gen_durable where status = 'executing')"
            )
            for number in [next(iter(numbers)), shelved[0]]:
                await da.inspect(number)
    assert traps.ran == ["start"]
    assert MODULE not in sys.modules
    assert [each for each in heard if each[0] != "import"] == []
    names = {each[1] for each in heard}
    assert not names & {name.partition(":")[0] for name in (*MACHINES, *STEPS)} - {"builtins", "__main__"}
    query = "select id, status::text, hold, last_error from durable.gen_durable"
    rows = {row[0]: row[1:] for row in conn.execute(query).fetchall()}
    for number, step in (numbers | woken).items():
        assert rows[number] == ("runnable", 2, None), step
    assert {rows[number][:2] for number in shelved} == {("runnable", 2)}


async def test_a_row_that_is_not_claimed_is_not_looked_up(durable_dsn, conn):
    """Of several versions and names that look alike, the registered one runs, and no other."""
    traps = Traps()
    odd = [
        add(conn, queue=QUEUE, fsm="registered", fsm_version=version, step="start")
        for version in (-1, 0, 2, 11)
    ]
    good = add(conn, queue=QUEUE, fsm="registered", step="start")
    async with engine(durable_dsn):
        assert await da.result(good, timeout=30) == "ran"
        await Session(conn).eventually("select count(*) = 4 from durable.gen_durable where hold = 2")
    assert traps.ran == ["start"]
    assert {
        conn.execute("select status::text from durable.gen_durable where id = %s", [n]).fetchone()
        for n in odd
    } == {("runnable",)}


@fuzz(60)
@given(name=any_text)
def test_a_name_is_looked_up_and_nothing_else(name):
    """The registry and the steps are dicts: what is not in them is unknown, whatever it looks like."""
    traps = Traps()
    with listening() as heard:
        with pytest.raises(da.UnknownMachine):
            current_registry().find(name)
        spec = current_registry().find("registered")
        with pytest.raises(da.ConfigError):
            plan_insert(spec, {"step": name})
        with pytest.raises(InvalidOutcome):
            da.Next(name) if not name or "\0" in name else _go(spec, name)
    assert (traps.ran, heard) == ([], [])


def _go(spec: Any, name: str) -> None:
    normalize_outcome(da.Next(name), spec, step="start", attempt=0, random=lambda: 0.5)
