"""What views work with: the client, the sampler, the settings; and what they return. No routes, no HTML."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import attrs

from durable_actors._client import Client
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.pool.pool import ConnectionPool
from durable_actors.dashboard.redaction import Redactor
from durable_actors.dashboard.sampler import Sampler
from durable_actors.dashboard.web import HttpError, Request
from durable_actors.dashboard_options import Dashboard
from durable_actors.otp import Node as TreeNode

T = TypeVar("T")

LANE: Final = "dashboard"
"""The lane of all that the dashboard reads and commands: connections of its own, beside the engine's."""


class LiveEngine(Protocol):
    """What an engine in the same process shows."""

    @property
    def incarnation(self) -> str:
        """As in the list of nodes."""
        ...

    def snapshot(self, *, tasks: int = 0) -> TreeNode:
        """Its supervision tree."""
        ...


@attrs.frozen(kw_only=True)
class Desk:
    """What views work with."""

    settings: Dashboard
    schema: str
    pool: ConnectionPool
    client: Client
    """For commands and for reading: the same calls as in Python and on the command line."""
    sampler: Sampler
    redactor: Redactor
    engine: LiveEngine | None = None
    """The engine of this process; None for a dashboard in a process of its own."""

    async def read(self, call: Callable[[PgConn, str], Awaitable[T]]) -> T:
        """Run a read function of the store: `await desk.read(read_nodes)`."""
        async with self.pool.acquire(LANE) as conn:
            return await call(conn, self.schema)


@attrs.frozen(kw_only=True)
class View:
    """What a view returns: `data` is the JSON twin, and what the template gets."""

    template: str
    title: str
    data: Mapping[str, Any]
    extra: Mapping[str, Any] = {}
    """For the template only: drawings, forms."""
    live: bool = True
    """Whether the page is updated when the bell rings."""


ViewFunction = Callable[..., Awaitable[View]]
"""`async def view(desk: Desk, request: Request, **parts of the path) -> View`."""


@attrs.frozen
class Form:
    """The fields of a form."""

    fields: Sequence[tuple[str, str]]

    def get(self, name: str, default: str = "") -> str:
        """The last field of this name, without spaces around it."""
        found = [value for key, value in self.fields if key == name]
        return found[-1].strip() if found else default

    def all(self, name: str) -> list[str]:
        """All fields of this name."""
        return [value for key, value in self.fields if key == name]

    def require_confirmation(self) -> None:
        """Raise `HttpError` 400 unless the box was ticked."""
        if self.get("confirm") != "yes":
            raise HttpError(400, "tick the box to confirm this")


@attrs.frozen(kw_only=True)
class Done:
    """What an action returns: where to go, and what the JSON twin says."""

    to: str
    """A path of the dashboard."""
    query: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}
    view: View | None = None
    """A page instead of `to`: a dry run asks for confirmation."""


ActionFunction = Callable[..., Awaitable[Done]]
"""`async def act(desk: Desk, request: Request, form: Form, **parts of the path) -> Done`."""


@attrs.frozen
class Nav:
    """An entry of the navigation."""

    title: str
    path: str
    key: str
    """The key that goes there."""


@attrs.frozen(kw_only=True)
class Page:
    """The route of a view."""

    path: str
    view: ViewFunction
    nav: Nav | None = None


@attrs.frozen(kw_only=True)
class Action:
    """The route of a command: POST."""

    path: str
    name: str
    """The command, for `authorize` and errors."""
    act: ActionFunction
    names_command: str | None = None
    """The field of the form that names the command which is given to many: `authorize` is asked about that, too."""


def said(desk: Desk, request: Request, form: Form) -> dict[str, Any]:
    """Who and why, for the receipt of a command. Raises `HttpError` if a reason is required and missing."""
    reason = form.get("reason") or None
    if reason is None and desk.settings.require_reason:
        raise HttpError(400, "give a reason")
    key = form.get("idempotency_key") or None
    return {
        "by": request.user or "dashboard",
        "reason": reason,
        "meta": {"via": "dashboard"},
        **({} if key is None else {"idempotency_key": key}),
    }
