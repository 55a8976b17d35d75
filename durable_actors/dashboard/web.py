"""Requests, responses and routes: as much of a web framework as the dashboard needs, on ASGI. No I/O of its own."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlencode

import attrs

from durable_actors.dashboard.server import Receive, Scope, Send

MAX_FORM: Final = 256 * 1024
"""Bytes of a form that are read."""
MAX_FIELDS: Final = 1200
"""Fields of a form: a page of instances may be selected."""


class HttpError(Exception):
    """A request that is answered with an error page."""

    def __init__(self, status: int, text: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})


@attrs.define(eq=False)
class Request:
    """What a view is asked for."""

    scope: Scope
    receive: Receive
    path: str
    """Below the prefix of the app, beginning with a slash, without `/api/v1`; quoted, as it was sent."""
    wants_json: bool
    user: str | None = None
    """Who asks, if the dashboard knows it."""
    role: str = "viewer"
    """`viewer` or `operator`."""

    @property
    def method(self) -> str:
        """GET, POST and so on."""
        return str(self.scope["method"])

    @property
    def root(self) -> str:
        """The prefix of all links, without a slash at its end."""
        return str(self.scope.get("root_path", "")).rstrip("/")

    @cached_property
    def headers(self) -> dict[str, str]:
        """By their names in lower case; of several with one name the last."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.scope["headers"]}

    @cached_property
    def query(self) -> dict[str, str]:
        """The parameters after the question mark, of several with one name the last. Postgres has no NUL: left out."""
        pairs = parse_pairs(self.scope.get("query_string", b""))
        return {name: value.replace("\0", "") for name, value in pairs}

    @cached_property
    def cookies(self) -> dict[str, str]:
        """By their names. Other programs on this computer share its cookies, and may use any characters in theirs."""
        pairs = (each.partition("=") for each in self.headers.get("cookie", "").split(";"))
        return {name.strip(): value.strip() for name, equals, value in pairs if equals}

    async def form(self) -> list[tuple[str, str]]:
        """Read the fields of a form, in order. Raises `HttpError`."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/x-www-form-urlencoded":
            raise HttpError(415, "send the form as application/x-www-form-urlencoded")
        body = b""
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise HttpError(400, "the form has not arrived")
            body += message.get("body", b"")
            if len(body) > MAX_FORM:
                raise HttpError(413, "the form is too large")
            if not message.get("more_body", False):
                return parse_pairs(body)


def parse_pairs(raw: bytes) -> list[tuple[str, str]]:
    """Parse a query string or a form. Raises `HttpError` if it has too many fields."""
    try:
        return parse_qsl(
            raw.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="replace"
        )
    except ValueError:
        raise HttpError(400, "too many fields") from None


class Response:
    """A whole response."""

    def __init__(
        self,
        body: bytes | str = b"",
        *,
        status: int = 200,
        content_type: str = "text/html; charset=utf-8",
        headers: Iterable[tuple[str, str]] = (),
    ) -> None:
        self.body = body.encode("utf-8", "replace") if isinstance(body, str) else body
        self.status = status
        self.headers: list[tuple[str, str]] = [("Content-Type", content_type), *headers]

    def add(self, headers: Mapping[str, str]) -> None:
        """Add headers that the response does not have."""
        have = {name.lower() for name, _ in self.headers}
        self.headers += [(name, value) for name, value in headers.items() if name.lower() not in have]

    def raw_headers(self) -> list[tuple[bytes, bytes]]:
        """As ASGI wants them."""
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]

    async def send_to(self, receive: Receive, send: Send) -> None:  # noqa: ARG002 - streams need it
        """Send it."""
        self.headers.append(("Content-Length", str(len(self.body))))
        await send({"type": "http.response.start", "status": self.status, "headers": self.raw_headers()})
        await send({"type": "http.response.body", "body": self.body})


def redirect(to: str, *, headers: Iterable[tuple[str, str]] = ()) -> Response:
    """See another page: the answer to a form."""
    return Response(status=303, headers=[("Location", to), *headers])


def link(root: str, path: str, **query: object) -> str:
    """A link within the dashboard. Parameters that are None are left out."""
    given = [(name, str(value)) for name, value in query.items() if value is not None]
    return root + quote(path, safe="/%:@,~") + (f"?{urlencode(given)}" if given else "")


def segment(value: object) -> str:
    """A value as one piece of a path, quoted: it may contain slashes."""
    return quote(str(value), safe="")


Handler = Callable[..., Awaitable["Response"]]
"""Answers the requests of a route: `async def handler(request, **parts of the path) -> Response`."""


@attrs.frozen
class Route:
    """A path with parts, such as `/instances/{id:int}`, and who answers it."""

    method: str
    pattern: str
    handler: Handler

    def regex(self) -> re.Pattern[str]:
        """The pattern, for a whole path. A part is one piece of the path; `:int` wants up to 18 digits."""
        found = ""
        for piece in re.split(r"(\{\w+(?::int)?\})", self.pattern):
            name = re.fullmatch(r"\{(\w+)(:int)?\}", piece)
            found += (
                re.escape(piece)
                if name is None
                else f"(?P<{name[1]}>{'[0-9]{1,18}' if name[2] else '[^/]+'})"
            )
        return re.compile(found)


class Router:
    """Finds the handler of a path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [(route, route.regex()) for route in routes]

    def find(self, method: str, path: str) -> tuple[Handler, dict[str, Any]]:
        """Return the handler, and the parts of the path. Raises `HttpError` 404 or 405."""
        methods: set[str] = set()
        if "%00" in path:
            raise HttpError(404, "there is no such page")  # Postgres has no name with a NUL
        for route, regex in self._routes:
            match = regex.fullmatch(path)
            if match is None:
                continue
            if route.method == method or (method == "HEAD" and route.method == "GET"):
                parts = match.groupdict()
                return route.handler, {
                    name: int(value)
                    if "{" + name + ":int}" in route.pattern
                    else unquote(value, errors="replace")
                    for name, value in parts.items()
                }
            methods.add(route.method)
        if methods:
            raise HttpError(405, f"{method} is not for this page", headers={"Allow": ", ".join(methods)})
        raise HttpError(404, "there is no such page")
