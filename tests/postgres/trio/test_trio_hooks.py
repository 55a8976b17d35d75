"""One test per undocumented part of psycopg that TrioConnection uses. Red: see `if_changed` there."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import psycopg
import psycopg.waiting
import pytest
from durable_actors._postgres.trio import wait as trio_wait
from durable_actors._postgres.trio.connection import TrioConnection
from durable_actors._postgres.trio.hooks import HOOKS, OVERRIDDEN_FOR_ASYNCIO, Hook
from psycopg import pq
from psycopg.copy import AsyncCopy, AsyncLibpqWriter

PSYCOPG = Path(psycopg.__file__).parent
OURS = sorted(Path(trio_wait.__file__).parent.glob("*.py"))

# Attributes that exist on instances only: the live objects below must have them.
INSTANCE = {
    ("psycopg:AsyncConnection", "lock"),
    ("psycopg:AsyncConnection", "_closed"),
    ("psycopg:AsyncConnection", "_autocommit"),
    ("psycopg:AsyncConnection", "_adapters"),
    ("psycopg:AsyncConnection", "_pipeline"),
    ("psycopg:AsyncTransaction", "_outer_transaction"),
    ("psycopg:AsyncTransaction", "_conn"),
    ("psycopg:AsyncPipeline", "_conn"),
    ("psycopg.copy:AsyncCopy", "_direction"),
    ("psycopg.copy:AsyncCopy", "_pgconn"),
    ("psycopg.copy:AsyncLibpqWriter", "_pgconn"),
}


def owner_of(hook: Hook) -> object:
    module, _, name = hook.owner.partition(":")
    found: object = importlib.import_module(module)
    return getattr(found, name) if name else found


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.owner}.{hook.name}")
def test_hook_exists_as_we_know_it(hook: Hook):
    if (hook.owner, hook.name) in INSTANCE:
        assert hook.params is None
        return
    found = inspect.getattr_static(owner_of(hook), hook.name, None)
    assert found is not None, f"psycopg {psycopg.__version__} has no {hook.name}: {hook.if_changed}"
    if hook.params is not None:
        function = found.__func__ if isinstance(found, classmethod) else found
        names = " ".join(inspect.signature(inspect.unwrap(function)).parameters)
        assert names == hook.params, f"psycopg {psycopg.__version__}: {hook.if_changed}"


async def test_attributes_of_instances(pg_dsn):
    # A plain AsyncConnection, made without asyncio: what psycopg itself puts there.
    with psycopg.connect(pg_dsn) as sync:
        conn = psycopg.AsyncConnection(sync.pgconn)
        pipeline = psycopg.AsyncPipeline(conn)
        cursor = psycopg.AsyncCursor(conn)
        live = {
            "psycopg:AsyncConnection": conn,
            "psycopg:AsyncTransaction": psycopg.AsyncTransaction(conn),
            "psycopg:AsyncPipeline": pipeline,
            "psycopg:AsyncCursor": cursor,
            "psycopg.copy:AsyncCopy": AsyncCopy(cursor),
            "psycopg.copy:AsyncLibpqWriter": AsyncLibpqWriter(cursor),
        }
        missing = [hook for hook in HOOKS if (hook.owner, hook.name) in INSTANCE
                   and not hasattr(live[hook.owner], hook.name)]  # fmt: skip
        assert not missing
        assert pipeline.level == 0


def test_the_numbers_of_waiting():
    waiting = psycopg.waiting
    assert (waiting.WAIT_R, waiting.WAIT_W, waiting.WAIT_RW) == (1, 2, 3)
    assert (waiting.READY_R, waiting.READY_W, waiting.READY_RW) == (1, 2, 3)


def test_psycopg_is_accelerated_and_its_libpq_is_new():
    assert pq.__impl__ in ("binary", "c")
    assert pq.version() >= 170000


def private_names(path: Path) -> tuple[set[str], set[str]]:
    """Return the private attributes that a module uses, and those that it defines itself."""
    used: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            used.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
    return used, defined


def test_no_private_name_is_used_that_is_not_in_the_table():
    own = {"_checkpointed_at", "_unwinders", "_stopping", "_after_commit", "_waiting", "_read", "_ended"}
    used: set[str] = set()
    defined: set[str] = set()
    for path in OURS:
        found = private_names(path)
        used |= found[0]
        defined |= found[1]
    hooks = {hook.name for hook in HOOKS}
    assert used - defined - own <= hooks
    assert {name for name in hooks if name.startswith("_") and name != "__init__"} <= used | defined


def functions_that_mention(module: Path, *names: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            mentioned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            if mentioned & set(names):
                found.add(node.name)
    return found


def test_what_touches_asyncio_in_psycopgs_connection_is_ours():
    found = functions_that_mention(
        PSYCOPG / "connection_async.py", "asyncio", "waiting", "ALock", "conninfo_attempts_async"
    )
    assert found <= OVERRIDDEN_FOR_ASYNCIO
    for name in OVERRIDDEN_FOR_ASYNCIO:
        assert getattr(TrioConnection, name) is not getattr(psycopg.AsyncConnection, name)


def test_nothing_else_of_psycopg_learnt_asyncio():
    importers = {
        path.relative_to(PSYCOPG).as_posix()
        for path in PSYCOPG.rglob("*.py")
        if any(
            (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "asyncio" for a in node.names))
            or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "asyncio")
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
        )
    }
    # _acompat: the lock, replaced, and the queue of AsyncQueuedLibpqWriter, refused. errors: CancelledError
    # in a list of what is raised without traceback. The others: connecting, which is done in a thread.
    assert importers <= {
        "_acompat.py", "_conninfo_attempts_async.py", "connection_async.py", "errors.py", "waiting.py",
        "_dns.py", "_compat.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "made", "where"),
    [
        ("cursor_async.py", "AsyncCopy", {"copy"}),
        ("cursor_async.py", "AsyncPipeline", {"executemany"}),  # is_supported() only
        ("connection_async.py", "AsyncTransaction", {"transaction"}),
        ("connection_async.py", "AsyncPipeline", {"pipeline", "_pipeline_nolock"}),
        ("_server_cursor_async.py", "AsyncCopy", set()),
    ],
)
def test_psycopg_makes_its_own_objects_only_where_we_override(module: str, made: str, where: set[str]):
    calls = {
        function.name
        for function in ast.walk(ast.parse((PSYCOPG / module).read_text("utf-8")))
        if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef)
        for node in ast.walk(ast.Module(function.body, []))
        if isinstance(node, ast.Name) and node.id == made and isinstance(node.ctx, ast.Load)
        and not any(node in ast.walk(a) for a in ast.walk(function) if isinstance(a, ast.AnnAssign))
    }  # fmt: skip
    assert calls == where
