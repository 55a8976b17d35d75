"""What `doctor` thinks of what it has read. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import attrs

from durable_actors._store.examine import Holder, ServerFacts, TableFacts
from durable_actors._store.migrate import SchemaVersion
from durable_actors._store.observe import NodeView
from durable_actors._store.releases import LiveNode, older_nodes
from durable_actors._wording import counted, seconds
from durable_actors.cli.overview import QueueView

Level = Literal["ok", "warning", "problem"]
MAX_SKEW: Final = 1.0
"""Seconds. Delays and deadlines are on the clock of the database, so a skew only confuses people and metrics."""
BAD_SKEW: Final = 60.0
OLD: Final = 300.0
"""Seconds for which a transaction may hold vacuum back."""
MANY_DEAD: Final = 10_000
DEAD_SHARE: Final = 0.2
OLDEST: Final = 140_000
NEWEST: Final = 190_000
"""The versions of Postgres that the project is tested with are between these."""


@attrs.frozen
class Finding:
    """The result of one check."""

    check: str
    level: Level
    found: str
    remedy: str | None = None
    """What to do about it; None if all is well."""


def check_clock(server: float, before: float, after: float) -> Finding:
    """Compare the clocks. `before` and `after` are this computer's, around the question."""
    skew = max(server - after, before - server, 0.0)
    if skew <= MAX_SKEW:
        return Finding(
            "clock", "ok", f"this computer and the database agree within {max(after - before, 0.001):.3f} s"
        )
    which = "ahead of" if server > after else "behind"
    return Finding(
        "clock",
        "problem" if skew > BAD_SKEW else "warning",
        f"the database's clock is {skew:.1f} s {which} this computer's",
        "run NTP (chrony, systemd-timesyncd) on both. Delays and deadlines use the database's clock",
    )


def check_server(server: ServerFacts) -> list[Finding]:
    """Version, settings and connections of the server."""
    major = server.version // 10_000
    found: list[Finding] = []
    if OLDEST <= server.version < NEWEST:
        found.append(Finding("postgres", "ok", f"Postgres {major}"))
    else:
        level: Level = "problem" if server.version < OLDEST else "warning"
        found.append(Finding("postgres", level, f"Postgres {major}", "use Postgres 14 to 18"))
    if server.standby:
        found.append(
            Finding(
                "database",
                "problem",
                "this server is a standby and accepts no writes",
                "connect to the primary: name all servers and add target_session_attrs=read-write to the DSN",
            )
        )
    for name, bad, level, why, remedy in _SETTINGS:
        value = server.settings.get(name)
        if value in bad:
            found.append(Finding("settings", level, f"{name} is {value}: {why}", remedy))
    if not any(each.check == "settings" for each in found):
        found.append(Finding("settings", "ok", "the server's settings suit a queue"))
    found.append(_check_connections(server))
    return found


_SET: Final = "alter system set {}, then select pg_reload_conf()"
_SETTINGS: Final[Sequence[tuple[str, tuple[str, ...], Level, str, str]]] = (
    ("autovacuum", ("off",), "problem", "dead rows are never removed", _SET.format("autovacuum = on")),
    ("track_counts", ("off",), "problem", "autovacuum cannot work", _SET.format("track_counts = on")),
    (
        "fsync",
        ("off",),
        "problem",
        "a crash of the server may destroy everything",
        _SET.format("fsync = on"),
    ),
    (
        "synchronous_commit",
        ("off",),
        "warning",
        "a crash of the server may lose outcomes that were acknowledged",
        _SET.format("synchronous_commit = on") + "; or accept it",
    ),
    (
        "idle_in_transaction_session_timeout",
        ("0", "0ms"),
        "warning",
        "a forgotten transaction holds vacuum back for ever",
        _SET.format("idle_in_transaction_session_timeout = '10min'"),
    ),
    (
        "default_transaction_isolation",
        ("serializable", "repeatable read"),
        "warning",
        "transactions of yours that insert or signal may have to be repeated",
        "use read committed for the role of the workers",
    ),
)


def _check_connections(server: ServerFacts) -> Finding:
    most = int(server.settings.get("max_connections") or 0)
    text = f"{server.connections} of {most} in use"
    if most and server.connections > 0.8 * most:
        return Finding(
            "connections",
            "warning",
            text,
            "fewer workers, a smaller --pool-size, or a larger max_connections",
        )
    return Finding("connections", "ok", text)


def check_versions(schema: SchemaVersion, mine: str, nodes: Sequence[NodeView]) -> list[Finding]:
    """The schema against this package, and the releases of the live nodes."""
    found: list[Finding] = []
    at = f"schema {schema.schema} is at version {schema.current}"
    if schema.pending:
        remedy = "run `durable-actors migrate`"
        found.append(Finding("schema", "problem", f"{at}; this package wants {schema.latest}", remedy))
    elif schema.is_newer:
        text = f"{at}, made by a newer release than this one ({mine})"
        found.append(Finding("schema", "warning", text, "upgrade durable-actors here"))
    else:
        found.append(Finding("schema", "ok", f"{at}, the newest of durable_actors {mine}"))
    live = [each for each in nodes if each.alive]
    lines = older_nodes(LiveNode(each.incarnation, each.version) for each in live)
    found += [Finding("versions", "warning", line, "replace these workers") for line in lines]
    if live and not lines:
        versions = ", ".join(sorted({each.version or "unknown" for each in live}))
        found.append(Finding("versions", "ok", f"all live workers run {versions}"))
    return found


def check_indexes(expected: Iterable[str], present: Mapping[str, bool], schema: str) -> list[Finding]:
    """Indexes that are missing, or that a `create index concurrently` has left unfinished."""
    found = [
        Finding(
            "indexes",
            "problem",
            f"index {name} is missing: statements that need it read the whole table",
            "create it as in `durable-actors migrate --sql`",
        )
        for name in sorted(set(expected) - set(present))
    ]
    found += [
        Finding(
            "indexes",
            "problem",
            f"index {name} is invalid: its creation was interrupted",
            f'reindex index concurrently "{schema}".{name}',
        )
        for name, valid in sorted(present.items())
        if not valid
    ]
    return found or [Finding("indexes", "ok", f"all {len(present)} indexes are there and valid")]


def check_bloat(tables: Sequence[TableFacts], schema: str) -> list[Finding]:
    """Tables with many dead rows."""
    found: list[Finding] = []
    for each in tables:
        if each.dead < MANY_DEAD or each.dead < DEAD_SHARE * each.live:
            continue
        last = "never" if each.vacuumed is None else f"{seconds(each.vacuumed)} ago"
        found.append(
            Finding(
                "bloat",
                "warning",
                f"{each.name} has {each.dead:,} dead rows beside {each.live:,} live ones; last vacuum: {last}",
                f'see what holds vacuum back (below), then: vacuum analyze "{schema}".{each.name}',
            )
        )
    if found:
        return found
    size = sum(each.size for each in tables) / 1_000_000
    return [Finding("bloat", "ok", f"few dead rows; all tables and indexes together have {size:,.1f} MB")]


def check_holders(holders: Sequence[Holder], *, sees_others: bool) -> list[Finding]:
    """Who keeps vacuum from removing dead rows."""
    remedies = {
        "transaction": "end it: select pg_terminate_backend({name})",
        "prepared": "rollback prepared '{name}', or commit it",
        "slot": "let its consumer catch up, or: select pg_drop_replication_slot('{name}')",
    }
    found = [
        Finding(
            "vacuum",
            "warning",
            f"{_described(each)} holds vacuum back ({each.about})",
            remedies[each.kind].format(name=each.name.replace("'", "''")),
        )
        for each in holders
    ]
    if not sees_others:
        text = "this role sees only its own sessions: other transactions may hold vacuum back"
        found.append(
            Finding("vacuum", "warning", text, "grant pg_read_all_stats to the role of the operators")
        )
    return found or [Finding("vacuum", "ok", f"no transaction is older than {seconds(OLD)}, no slot lags")]


def _described(holder: Holder) -> str:
    if holder.kind == "slot":
        return f"replication slot {holder.name}, {holder.transactions:,} transactions behind,"
    kind = f"process {holder.name}" if holder.kind == "transaction" else f"prepared transaction {holder.name}"
    return f"{kind}, in a transaction for {seconds(holder.seconds)},"


def check_work(views: Sequence[QueueView], nodes: Sequence[NodeView]) -> list[Finding]:
    """Queues and machines that nobody serves, pauses with a backlog, nodes that were lost."""
    found: list[Finding] = []
    for view in views:
        waiting = view.due + view.held + view.shelved + view.throttled
        if waiting and not view.nodes:
            text = f"queue {view.queue!r} has {counted(waiting, 'instance')} waiting, and no live worker serves it"
            found.append(Finding("workers", "problem", text, f"serve it: --queue {view.queue}"))
        elif view.unknown:
            first = ", ".join(view.unknown[:3]) + (", …" if len(view.unknown) > 3 else "")
            text = f"no live worker of queue {view.queue!r} knows {first}"
            found.append(Finding("workers", "problem", text, "deploy the code that has it, or bring it back"))
        for pause in view.pauses:
            if pause.machine is None and view.due:
                text = f"queue {view.queue!r} is paused and has {counted(view.due, 'instance')} due"
                remedy = f"resume it when you are ready: durable-actors queue resume {view.queue}"
                found.append(Finding("workers", "warning", text, remedy))
    lost = [each for each in nodes if each.state == "lost" and each.claims]
    found += [
        Finding(
            "workers",
            "warning",
            f"worker {each.incarnation} was lost and still holds {counted(each.claims, 'claim')}",
            "wait: other workers take them back after --dead-after; start one if none is alive",
        )
        for each in lost
    ]
    live = sum(each.alive for each in nodes)
    if not found:
        text = "no worker is alive, and nothing waits" if not live else f"{live} live, nothing waits in vain"
        found.append(Finding("workers", "ok", text))
    return found
