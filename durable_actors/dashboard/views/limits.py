"""Limits: how full each is, when the next token comes, who has the slots, who waits; set and clear."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import attrs
import msgspec
from markupsafe import Markup

from durable_actors._limits import Limit
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.audit import read_receipts_of
from durable_actors._store.commands import Receipt, plan_command
from durable_actors._store.limits import LimitCaps, LimitInfo, LimitKey, read_limits, set_limit
from durable_actors._store.read import Instance, read_by_ids
from durable_actors._wording import counted, seconds
from durable_actors.dashboard.desk import Action, Desk, Done, Form, Nav, Page, View, said
from durable_actors.dashboard.drawing import bar
from durable_actors.dashboard.forms import duration, number, whole
from durable_actors.dashboard.web import Request, segment
from durable_actors.errors import NoTarget

SCOPE: Final = "limit"
LINES: Final = 20_000
"""Keys and slots that a page looks at, of each kind."""
LIST: Final = LimitCaps(keys=5, waiting=1000, lines=LINES)
ONE: Final = LimitCaps(keys=50, waiting=1000, lines=LINES)
MOST: Final = 100
"""Limits that the list shows."""
HOLDERS: Final = 100
"""Instances with a slot that the page of a limit shows."""
RECEIPTS: Final = 20
_PER: Final = {1.0: "second", 60.0: "minute", 3600.0: "hour", 86400.0: "day"}
DONE: Final = {
    "set_limit": "The limit is set. It counts from the next pick on, whatever is deployed, until it is cleared.",
    "clear_limit": "What the code declares counts again.",
}


async def limits(desk: Desk, request: Request) -> View:
    """List the limits by name, each with its busiest keys; `q` those whose name contains it."""
    part = request.query.get("q", "").strip()

    async def read(conn: PgConn, schema: str) -> list[LimitInfo]:
        return await read_limits(conn, schema, caps=LIST)

    everything = await desk.sampler.shared("limits", read)
    found = [each for each in everything if part in each.name]
    data = {
        "limits": [_shown(each) for each in found[:MOST]],
        "q": part,
        "left_out": max(len(found) - MOST, 0),
        "capped": any(each.capped for each in everything),
    }
    extra = {"levels": {each.name: _levels(each) for each in found[:MOST]}, "lines": LINES, "caps": LIST}
    return View(template="limits.html", title="Limits", data=data, extra=extra)


async def limit(desk: Desk, request: Request, name: str) -> View:
    """Show one limit; `q` only keys that contain it. Raises `NoTarget`."""
    part = request.query.get("q", "").replace("\0", "").strip()
    wanted = name.replace("\0", "")

    async def read(
        conn: PgConn, schema: str
    ) -> tuple[list[LimitInfo], Mapping[int, Instance], tuple[Receipt, ...]]:
        found = await read_limits(conn, schema, caps=ONE, name=wanted, containing=part or None)
        ids = [number for each in found for key in each.keys for number in key.holders][:HOLDERS]
        rows = await read_by_ids(conn, schema, sorted(ids), full=False) if ids else {}
        return found, rows, await read_receipts_of(conn, schema, SCOPE, wanted, limit=RECEIPTS)

    found, rows, receipts = await desk.read(read)
    if not found and not receipts:
        raise NoTarget(f"there is no limit {name[:200]!r}")
    info = found[0] if found else _unknown(name)
    data = {
        "limit": _shown(info),
        "holders": [_holder(key, rows[each]) for key in info.keys for each in key.holders if each in rows],
        "q": part,
        "receipts": [desk.redactor.receipt(each) for each in receipts],
    }
    extra = {
        "levels": _levels(info),
        "once": _once,
        "done": DONE.get(request.query.get("done", "")),
        "lines": LINES,
        "caps": ONE,
        "fields": fields_of(info),
    }
    return View(template="limit.html", title=f"Limit {name}", data=data, extra=extra)


def _unknown(name: str) -> LimitInfo:
    """A limit that was set once, and that neither the code nor an operator has now."""
    return LimitInfo(
        name=name, known=False, declared=None, declared_at=None, declared_by=None, override=None, set_at=None,
        set_by=None, reason=None, interval=None, burst=None, slots=None, on_full="wait", held="step", keys=(),
    )  # fmt: skip


def _shown(info: LimitInfo) -> dict[str, Any]:
    """A limit for the JSON twin, with what the numbers of its keys say together."""
    more = info.capped or info.keys_total > len(info.keys)
    dates = [key.next_at for key in info.keys if key.next_at is not None]
    blocked = [key.blocked_until for key in info.keys if key.blocked_until is not None]
    return {
        **{name: getattr(info, name) for name in info.__struct_fields__},
        "keys": [_key(info, key) for key in info.keys],
        "rule": rule_words(info),
        "declared_rule": None if info.declared is None else declared_words(info.declared),
        "waiting": sum(key.waiting for key in info.keys),
        "taken": sum(key.taken for key in info.keys),
        "next_at": min(dates, default=None),
        "blocked_until": max(blocked, default=None),
        "more": more,
    }


def _key(info: LimitInfo, key: LimitKey) -> dict[str, Any]:
    left = None if key.spent is None or info.burst is None else max(info.burst - key.spent, 0.0)
    return {**msgspec.structs.asdict(key), "left": left}


def _holder(key: LimitKey, row: Instance) -> dict[str, Any]:
    return {
        "key": key.key,
        "id": row.id,
        "machine": row.machine,
        "step": row.step,
        "queue": row.queue,
        "node": row.locked_by,
        "since": row.updated_at,
    }


def rule_words(info: LimitInfo) -> str:
    """What counts now, in words. Pure."""
    now = info.declared if info.override is None else info.override
    return "nobody has declared it" if now is None else declared_words(now)


def declared_words(declared: Mapping[str, float | str]) -> str:
    """A definition in words: "100 per minute, 20 at once; 4 slots". Pure."""
    parts: list[str] = []
    if "rate" in declared:
        rate, per = float(declared["rate"]), float(declared.get("per", 1.0))
        burst = float(declared.get("burst", max(math.ceil(rate), 1)))
        parts.append(f"{rate:,.12g} per {_PER.get(per) or seconds(per)}, {burst:,g} at once")
    if "slots" in declared:
        kept = ", held until the instance ends" if declared.get("held") == "instance" else ""
        parts.append(counted(int(declared["slots"]), "slot") + kept)
    if declared.get("on_full") == "drop":
        parts.append("what finds it full is dropped")
    return "; ".join(parts)


def _levels(info: LimitInfo) -> dict[str, Markup]:
    """A gauge for each key: what is spent of the burst, or of the slots, whichever is more."""
    found: dict[str, Markup] = {}
    for key in info.keys:
        spent = 0.0 if key.spent is None or not info.burst else key.spent / info.burst
        taken = key.taken / info.slots if info.slots else 0.0
        share = max(spent, taken)
        used = share if math.isfinite(share) else 1.0
        found[key.key] = bar(used, label=f"{min(used, 1.0):.0%} used")
    return found


def fields_of(info: LimitInfo) -> dict[str, str]:
    """What the form begins with: what counts now. Pure."""
    now = info.override or info.declared or {}
    return {
        name: f"{float(now[name]):.12g}" if name in now else "" for name in ("rate", "per", "burst", "slots")
    }


def _once() -> str:
    """An idempotency key for one form: sent twice, it is one command."""
    return f"dashboard-{secrets.token_hex(12)}"


async def set_(desk: Desk, request: Request, form: Form, name: str) -> Done:
    """Let another rate or number of slots count. Fields that are empty set nothing; `on_full` and `held` stay."""
    rate, per, burst, slots = (form.get(each) for each in ("rate", "per", "burst", "slots"))
    wanted = Limit(
        number(rate, "rate") if rate else None,
        per=duration(per) if per else 1.0,
        burst=whole(burst, "burst") if burst else None,
        slots=whole(slots, "slots") if slots else None,
    )
    form.require_confirmation()
    await _change(desk, name, wanted, said(desk, request, form))
    return Done(
        to=f"/limits/{segment(name)}", query={"done": "set_limit"}, data={"name": name, "result": "set"}
    )


async def clear(desk: Desk, request: Request, form: Form, name: str) -> Done:
    """Let the definition of the code count again. Raises `NoTarget` if nobody has set another one."""
    if not await _change(desk, name, None, said(desk, request, form)):
        raise NoTarget(f"limit {name[:200]!r} was not set by an operator")
    data = {"name": name, "result": "cleared"}
    return Done(to=f"/limits/{segment(name)}", query={"done": "clear_limit"}, data=data)


async def _change(desk: Desk, name: str, wanted: Limit | None, who: Mapping[str, Any]) -> bool:
    command = plan_command(**who)

    async def write(conn: PgConn, schema: str) -> bool:
        found = [] if wanted is None else await read_limits(conn, schema, caps=LimitCaps(keys=0), name=name)
        now = (found[0].override or found[0].declared or {}) if found else {}
        stays = {each: now[each] for each in ("on_full", "held") if each in now}
        limit = None if wanted is None else attrs.evolve(wanted, **cast("Any", stays))
        return await set_limit(conn, schema, name, limit, command)

    return await desk.read(write)


PAGES: Final[Sequence[Page]] = (
    Page(path="/limits", view=limits, nav=Nav("Limits", "/limits", "l")),
    Page(path="/limits/{name}", view=limit),
)
ACTIONS: Final[Sequence[Action]] = (
    Action(path="/limits/{name}/set", name="set_limit", act=set_),
    Action(path="/limits/{name}/clear", name="clear_limit", act=clear),
)
