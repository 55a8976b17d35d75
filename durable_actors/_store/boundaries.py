"""Manual boundaries as rows have them: what a person is asked, and what was decided.

The column `manual` is a JSON object: `kind`, `then`, `title`, `data`, `on_reject`, `on_timeout` as the outcome said,
and from the decision on `decision`. `await_step` has the step of the deadline: who wakes it otherwise approves nothing.
Only a hand writes another one; `durable.waits_for` and `read_manual` agree on what counts.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal, Unpack, cast, get_args

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commands import MAX_TEXT, Command, Receipt, Said, plain_text, plan_command
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, StateError
from durable_actors.machine import Decision, decode_or_text, encode_json

MAX_DATA_BYTES: Final = 65_536
"""The largest `data` of a decision, in bytes of JSON."""

Waiting = Literal["approval", "pause", "signal", "children"]
"""What a parked instance waits for, as `durable.waits_for` says."""
Verb = Literal["proceed", "approve", "reject"]
DecisionKind = Literal["proceeded", "approved", "rejected", "timed_out"]


@attrs.frozen(kw_only=True)
class Boundary:
    """Where an instance waits for a person (`Pause`, `Approval`)."""

    kind: Literal["pause", "approval"]
    """A pause is resolved by `proceed`, an approval by `approve` or `reject`."""
    title: str | None = None
    """What is asked, for people."""
    data: Any = None
    """What the person should know; None in lists that are not `full`."""
    then: str
    """The step that it enters when it proceeds or is approved."""
    on_reject: str | None = None
    """The step that it enters when it is rejected; None: it fails."""
    on_timeout: str | None = None
    """The step that it enters after the deadline; None: as if it were rejected."""
    since: datetime
    """When it began to wait."""
    deadline: datetime | None = None
    """Until when; None: without a limit."""


def read_manual(
    raw: bytes | None, *, parked: bool, step: str, since: datetime, deadline: datetime | None
) -> tuple[Boundary | None, Decision | None]:
    """The open boundary of a row, or the decision that its step gets. `parked`: it is awaiting_signal."""
    found: object = None if raw is None else decode_or_text(raw)
    if not isinstance(found, dict):
        return None, None
    manual = cast("dict[str, Any]", found)
    if "decision" in manual:
        return None, read_decision(manual["decision"])
    kind = manual.get("kind")
    if not parked or not isinstance(kind, str) or kind not in {"pause", "approval"}:
        return None, None
    boundary = Boundary(
        kind=cast("Literal['pause', 'approval']", kind),
        title=_text(manual.get("title")),
        data=manual.get("data"),
        then=_text(manual.get("then")) or step,
        on_reject=_text(manual.get("on_reject")),
        on_timeout=_text(manual.get("on_timeout")),
        since=since,
        deadline=deadline,
    )
    return boundary, None


def read_decision(found: object) -> Decision | None:
    """A stored decision; None for what is none (only a hand writes that)."""
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    kind = fields.get("kind")
    if kind not in get_args(DecisionKind):
        return None
    return Decision(
        kind=cast("DecisionKind", kind),
        by=_text(fields.get("by")),
        comment=_text(fields.get("comment")),
        data=fields.get("data"),
        at=_instant(fields.get("at")),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _instant(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None


class DecisionSaid(Said, total=False):
    """What a decision says about itself."""

    comment: str | None
    """What the person has to say, for the step and the receipt."""
    data: object
    """A JSON value for the step."""


@attrs.frozen
class DecisionPlan:
    """A decision: the checked arguments of `proceed`, `approve` and `reject`."""

    verb: Verb
    command: Command
    params: list[bytes | None]
    """The last parameters of resolve_boundary.sql."""


def plan_decision(
    verb: Verb, *, comment: object = None, data: object = None, **said: Unpack[Said]
) -> DecisionPlan:
    """Check what a caller says about a decision. Raises `ConfigError`."""
    return DecisionPlan(verb, plan_command(**said), decision_params(verb, comment, data))


def decision_params(verb: Verb, comment: object, data: object) -> list[bytes | None]:
    """The last parameters of resolve_boundary.sql. Raises `ConfigError`."""
    text = plain_text("comment", comment, MAX_TEXT)
    try:
        given = None if data is None else encode_json(data, what="data")
    except StateError as error:
        raise ConfigError(str(error), option="data") from error
    if given is not None and len(given) > MAX_DATA_BYTES:
        raise ConfigError(
            f"data has {len(given)} bytes of JSON, the limit is {MAX_DATA_BYTES}", option="data"
        )
    return [verb.encode(), None if text is None else text.encode(), given]


async def decide_instance(
    conn: PgConn, schema: str, number: int, verb: Verb, *, comment: str | None = None, data: object = None
) -> bool:
    """Resolve the boundary of an instance; False if it does not wait for that decision or does not exist."""
    params = [encode.number(number), *Command().params(), *decision_params(verb, comment, data)]
    return bool((await conn.run(statement("resolve_boundary", schema), params)).rows)


def told(decision: Decision) -> str:
    """A decision, in a sentence about an instance: "it was approved by ada at 12:00: looks good"."""
    if decision.kind == "timed_out":
        return "nobody decided in time"
    done = "let proceed" if decision.kind == "proceeded" else decision.kind
    by = f" by {decision.by}" if decision.by else ""
    at = "" if decision.at is None else f" at {decision.at:%Y-%m-%d %H:%M:%S %Z}"
    return f"it was {done}{by}{at}" + (f": {decision.comment}" if decision.comment else "")


def decision_of(receipt: Receipt) -> Decision | None:
    """The decision that a receipt tells; None for other commands."""
    kinds: dict[str, DecisionKind] = {"proceed": "proceeded", "approve": "approved", "reject": "rejected"}
    kind = kinds.get(receipt.command)
    if kind is None:
        return None
    return Decision(
        kind=kind, by=receipt.by, comment=_text(receipt.data.get("comment")), data=None, at=receipt.at
    )
