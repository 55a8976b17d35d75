"""Commands of operators: who, why, idempotency key; the receipts that they leave; requests to running nodes. Pure.

A command is one SQL statement: its effect, in CTEs, whose RETURNING feeds one INSERT into `receipts`. So neither an
effect without a receipt nor a receipt without an effect can be committed, also in a caller's savepoint. Everything else
that a command changes (a parent's barrier, …) derives from the same RETURNING. It cannot derive from `xmin`, as the
riders of a commit do: inside a savepoint that is the savepoint's, not the transaction's. The unique index
`receipts_once` decides between two calls with one key.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, TypedDict, TypeGuard, cast

import attrs

from durable_actors._option_checks import shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_instant
from durable_actors._postgres.driver.statement import Row
from durable_actors._store.sql import statement
from durable_actors.errors import ConfigError, StateError
from durable_actors.machine import Cancellation, decode_json, decode_or_text, encode_json

MAX_TEXT: Final = 2000
"""The longest `by` or `reason`, in characters."""
MAX_KEY_BYTES: Final = 500
"""The longest idempotency key: it is part of an index entry."""
MAX_META_BYTES: Final = 65_536
"""The largest `meta`, in bytes of JSON."""
CANCEL: Final = "cancel"
"""The kind of a request to cancel the instance."""
PAUSE: Final = "pause"
"""The kind of a request that keeps the instance from being picked."""
INSTANCE: Final = "instance"
"""The scope of receipts whose target is an instance."""
QUEUE: Final = "queue"
"""The scope of receipts whose target is a queue, or a machine in a queue."""

REDACTED: Final = "[redacted]"
_SECRET: Final = (
    "token", "secret", "password", "passwd", "passphrase", "authorization", "apikey", "accesskey", "privatekey",
    "credential", "cookie",
)  # fmt: skip
"""A name that contains one of these, without regard to case and punctuation, has a secret value."""
_SECRET_WORDS: Final = frozenset({"auth", "pwd"})
"""As whole names only: `author` is no secret."""


# -- commands


@attrs.frozen(kw_only=True)
class Command:
    """What every command says about itself; `plan_command` makes one."""

    by: str | None = None
    """Who gave it."""
    reason: str | None = None
    """Why."""
    idempotency_key: str | None = None
    """The same command on the same target with the same key is carried out once."""
    data: bytes = b"{}"
    """Further facts: a JSON object without secrets."""

    def params(self) -> list[bytes | None]:
        """The parameters of the receipt, in the order of every command's statement."""
        return [*map(encode.text, (self.by, self.reason, self.idempotency_key)), self.data]


class Said(TypedDict, total=False):
    """What every command says about itself."""

    by: str | None
    """Who gives it, for the receipt."""
    reason: str | None
    """Why."""
    idempotency_key: str | None
    """The same command on the same target with the same key is carried out once."""
    meta: Mapping[str, Any] | None
    """Further facts, for the receipt: a dict, in which secrets are redacted."""


def plan_command(
    *, by: object = None, reason: object = None, idempotency_key: object = None, meta: object = None
) -> Command:
    """Check what a caller says about a command. Raises `ConfigError`."""
    key = plain_text("idempotency_key", idempotency_key, MAX_KEY_BYTES)
    if key is not None and len(key.encode()) > MAX_KEY_BYTES:
        raise ConfigError(
            f"idempotency_key={shown(key)} has more than {MAX_KEY_BYTES} bytes",
            option="idempotency_key",
            value=key,
        )
    return Command(
        by=plain_text("by", by, MAX_TEXT),
        reason=plain_text("reason", reason, MAX_TEXT),
        idempotency_key=key,
        data=b"{}" if meta is None else _document(meta),
    )


def plain_text(option: str, value: object, maximum: int) -> str | None:
    """A text that Postgres can store, or None. Raises `ConfigError`."""
    if value is None:
        return None
    if not (
        isinstance(value, str) and 0 < len(value) <= maximum and "\0" not in value and _is_unicode(value)
    ):
        raise ConfigError(
            f"{option}={shown(value)} must be a text of 1 to {maximum} characters without NUL or lone surrogates",
            option=option,
            value=value,
        )
    return value


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _document(meta: object) -> bytes:
    if not _is_mapping(meta):
        raise ConfigError(f"meta must be a dict; it is {shown(meta)}", option="meta", value=meta)
    try:
        plain = decode_json(encode_json(dict(meta), what="meta"), what="meta")
        data = encode_json(redacted(plain), what="meta")
    except StateError as error:
        raise ConfigError(str(error), option="meta") from error
    except RecursionError:
        raise ConfigError("meta is nested too deeply", option="meta") from None
    if len(data) > MAX_META_BYTES:
        raise ConfigError(f"meta has {len(data)} bytes of JSON, the limit is {MAX_META_BYTES}", option="meta")
    return data


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def redacted(value: object) -> object:
    """The JSON value with the values of secret names replaced, at any depth."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {name: REDACTED if is_secret(name) else redacted(each) for name, each in fields.items()}
    if isinstance(value, list):
        return [redacted(each) for each in cast("list[object]", value)]
    return value


def is_secret(name: str) -> bool:
    """Whether the value of this name is a secret, as that of `password`, `api_key`, `X-Auth-Token`, `clientSecret`."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    letters = "".join(filter(str.isalnum, folded))
    return letters in _SECRET_WORDS or any(word in letters for word in _SECRET)


# -- receipts


@attrs.frozen(kw_only=True)
class Receipt:
    """One command that was carried out: who gave it, when and why."""

    id: int
    """Increases with each receipt."""
    at: datetime
    """When the transaction of the command began."""
    command: str
    """The name of the command, as "retry"."""
    scope: str
    """What `target` names: "instance", "queue" or "schedule"."""
    target: str
    """The id of the instance, as text; the name of the queue, or `queue/machine`; the name of the schedule."""
    by: str | None
    """Who gave the command."""
    reason: str | None
    """Why."""
    idempotency_key: str | None
    """With the same key the command is carried out only once on this target."""
    data: Mapping[str, Any]
    """What was given as `meta`; secrets are "[redacted]"."""
    result: object
    """What the call returned."""


def read_receipt(row: Row) -> Receipt:
    """Read a row of list_receipts.sql, list_receipts_of.sql or find_receipt.sql."""
    number, at, command, scope, target, by, reason, key, data, result = row
    instant = decode_instant(at)
    assert instant is not None
    found = decode_or_text(data or b"{}")
    return Receipt(
        id=int(number or 0),
        at=instant,
        command=(command or b"").decode(),
        scope=(scope or b"").decode(),
        target=(target or b"").decode(),
        by=None if by is None else by.decode(),
        reason=None if reason is None else reason.decode(),
        idempotency_key=None if key is None else key.decode(),
        data=cast("dict[str, Any]", found) if isinstance(found, dict) else {"data": found},
        result=None if result is None else decode_or_text(result),
    )


async def read_receipts_of(
    conn: PgConn, schema: str, *, scope: str, target: str, before: int = 2**63 - 1, limit: int = 100
) -> list[Receipt]:
    """The newest receipts of one target, such as a queue, with ids below `before`."""
    texts = [encode.text(scope), encode.text(target)]
    params = [*texts, encode.number(before), encode.number(limit), None]
    rows = (await conn.run(statement("list_receipts_of", schema, read_only=True), params)).rows
    return [*map(read_receipt, rows)]


# -- requests


@attrs.frozen
class Request:
    """The standing order of a command, in the column `request` of a row: to cancel the instance, or to pause it.

    A JSON object with the names of these fields; `at` is an instant in ISO format.
    """

    kind: str
    """What is asked for: "cancel", "pause"."""
    by: str | None = None
    reason: str | None = None
    at: datetime | None = None
    """When it was asked for, on the clock of the database."""
    on_cancel: str | None = None
    """The step that a cancelled instance enters instead of ending."""
    children: str | None = None
    """"cancel": its children are cancelled, too."""
    parent: int | None = None
    """It is cancelled because this parent of it was, or goes on without it."""

    @property
    def cancels(self) -> bool:
        """Whether it asks to cancel the instance, as `durable.asked_to_cancel` decides it."""
        return self.kind == CANCEL

    @property
    def pauses(self) -> bool:
        """Whether it pauses the instance, as `durable.asked_to_pause` decides it."""
        return self.kind == PAUSE


def read_request(raw: bytes) -> Request | None:
    """Read the column `request`; None for what is not a request (only a hand writes that)."""
    value: object = decode_or_text(raw)
    if not isinstance(value, dict):
        return None
    given = cast("dict[str, object]", value)
    fields = {name: each for name, each in given.items() if isinstance(each, str)}
    kind, parent = fields.get("kind"), given.get("parent")
    if kind is None:
        return None
    return Request(
        kind,
        fields.get("by"),
        fields.get("reason"),
        _instant(fields.get("at")),
        fields.get("on_cancel"),
        fields.get("children"),
        parent if isinstance(parent, int) and not isinstance(parent, bool) else None,
    )


def read_cancellation(raw: bytes) -> Cancellation:
    """Read the column `cancellation`. What a hand wrote there is a cancellation without a reason."""
    value: object = decode_or_text(raw)
    given = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    fields = {name: each for name, each in given.items() if isinstance(each, str)}
    upstream, visit = given.get("upstream"), given.get("visit")
    return Cancellation(
        fields.get("reason"),
        fields.get("by"),
        _instant(fields.get("at")),
        upstream if type(upstream) is int else None,
        fields.get("limit"),
        visit if type(visit) is int else None,
    )


def _instant(text: str | None) -> datetime | None:
    try:
        found = None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found is not None and found.tzinfo is not None else None
