"""Start-up while Postgres is not ready: it is starting or recovering, or a table is locked for a moment.

We wait for conditions that may pass, and report at once what an operator must fix. A failed connect does not say which
of the two it is: libpq returns a text in the server's language and no SQLSTATE. So we ping the server, with the first
message of its protocol, to see whether it accepts connections at all (`PQping` would do the same, but psycopg holds the
GIL while it waits: a silent server would freeze the whole process). If it accepts connections but refuses ours twice,
the password, the role or the database name is wrong.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

import psycopg
import psycopg.conninfo
import trio
from psycopg import pq

from durable_actors._postgres.driver.conninfo import engine_conninfo
from durable_actors._postgres.driver.failures import RETRYABLE
from durable_actors.errors import SchemaError, StoreUnavailable

logger: Final = logging.getLogger("durable_actors")

BLOCKED_BY_LOCK: Final = RETRYABLE | {"57014"}
"""SQLSTATEs of a statement that waited too long for a lock; 57014 is the role's `statement_timeout`."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 1.0
"""Seconds between two attempts; the pause doubles."""
PING_TIMEOUT: Final = 3.0
"""Seconds after which a server counts as not answering."""
PROTOCOL_VERSION: Final = 196608
"""Version 3.0 of the protocol."""
NOT_ACCEPTING: Final = frozenset({b"57P03", b"57P01", b"57P02", b"53300"})
"""SQLSTATEs of a server that is starting, recovering or stopping, or has no connection left."""

T = TypeVar("T")


class InRecovery(SchemaError):  # noqa: N818 - as its siblings
    """This server is a standby, or it is replaying its log after a restore."""


async def when_ready(attempt: Callable[[], Awaitable[T]], dsns: Iterable[str], *, start_timeout: float) -> T:
    """Run `attempt` until it succeeds, for at most `start_timeout` seconds. It must be safe to repeat.

    Raises errors that an operator must fix at once, and `StoreUnavailable` when the time is over. Logs one WARNING when
    it begins to wait. `dsns` are the DSNs that `attempt` connects to.
    """
    began = trio.current_time()
    pause, refused, warned = FIRST_PAUSE, False, False
    while True:
        try:
            result = await attempt()
        except (StoreUnavailable, psycopg.Error, InRecovery) as exc:
            if isinstance(exc, psycopg.Error) and exc.sqlstate not in BLOCKED_BY_LOCK:
                raise
            again = refused
            refused = _is_failed_connect(exc) and await _accepts_connections(dsns)
            if again and refused:
                raise
            left = began + start_timeout - trio.current_time()
            if left <= 0:
                if not start_timeout and isinstance(exc, StoreUnavailable):
                    raise
                text = f"Postgres was not ready within start_timeout={start_timeout:g} s: {exc}"
                raise StoreUnavailable(text) from exc
            if not (warned or refused):
                warned = True
                logger.warning("waiting for Postgres, for up to %g s: %s", start_timeout, exc)
        else:
            if warned:
                logger.info("Postgres is ready after %.1f s", trio.current_time() - began)
            return result
        await trio.sleep(min(pause, left))
        pause = min(pause * 2, LONGEST_PAUSE)


def _is_failed_connect(error: BaseException) -> bool:
    """Whether libpq got no session at all. Errors of an existing session have a SQLSTATE."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, psycopg.OperationalError) and cause.sqlstate is None:
            return True
        cause = cause.__cause__
    return False


async def _accepts_connections(dsns: Iterable[str]) -> bool:
    """Whether the servers of all these DSNs accept connections. False also if that cannot be found out."""
    for dsn in dsns:
        options = _resolved(engine_conninfo(dsn))
        answer: bool | None = None
        with trio.move_on_after(PING_TIMEOUT):
            for host, port in _addresses(options):
                with suppress(OSError, trio.BrokenResourceError):
                    answer = await _ping(host, port, options)
                if answer is not None:
                    break  # the first host that answers decides, as in libpq
        if not answer:
            return False
    return True


def _resolved(conninfo: str) -> dict[str, str]:
    """The connection options, with libpq's defaults and environment variables filled in."""
    found = {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.val is not None
    }
    given = psycopg.conninfo.conninfo_to_dict(conninfo)
    return found | {name: str(value) for name, value in given.items() if value is not None}


def _addresses(options: Mapping[str, str]) -> list[tuple[str, int]]:
    """Hosts and ports, as libpq pairs them: one port, or one for each host."""
    hosts = (options.get("hostaddr") or options.get("host") or "").split(",")
    ports = (options.get("port") or "5432").split(",")
    if len(ports) != len(hosts):
        ports = ports[:1] * len(hosts)
    pairs = zip(hosts, (port or "5432" for port in ports), strict=True)
    return [(host, int(port)) for host, port in pairs if host and port.isascii() and port.isdigit()]


async def _ping(host: str, port: int, options: Mapping[str, str]) -> bool | None:
    """Send a startup message; return whether the server accepts sessions now. None: no Postgres answered."""
    stream = (
        await trio.open_unix_socket(f"{host}/.s.PGSQL.{port}")
        if host.startswith("/")
        else await trio.open_tcp_stream(host, port)
    )
    async with stream:
        user = options.get("user", "postgres")
        names = ("user", user, "database", options.get("dbname", user), "")
        message = struct.pack("!i", PROTOCOL_VERSION) + b"\0".join(name.encode() for name in names) + b"\0"
        await stream.send_all(struct.pack("!i", len(message) + 4) + message)
        answer = bytes(await stream.receive_some(4096))
    if answer[:1] != b"E":
        return bool(answer) or None
    fields = {field[:1]: field[1:] for field in answer[5:].split(b"\0")}
    return fields.get(b"C") not in NOT_ACCEPTING
