"""The ASGI app: routes, access, errors, security headers. Views and actions are in `views`, one module per view."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote

import psycopg
import trio

from durable_actors.dashboard import render
from durable_actors.dashboard.access import COOKIE, Challenge, check_access, check_origin, same, session_of
from durable_actors.dashboard.desk import Action, Desk, Done, Form, Page, View
from durable_actors.dashboard.events import BellStream
from durable_actors.dashboard.server import Receive, Scope, Send
from durable_actors.dashboard.views import ACTIONS, PAGES
from durable_actors.dashboard.views.health import health_routes
from durable_actors.dashboard.web import Handler, HttpError, Request, Response, Route, Router, link, redirect
from durable_actors.dashboard_options import Dashboard
from durable_actors.errors import ConfigError, DurableError, NoTarget, StoreUnavailable

logger = logging.getLogger("durable_actors.dashboard")

API: Final = "/api/v1"
VIEW_SECONDS: Final = 10.0
"""Time for a page; then the answer is 504."""
ACTION_SECONDS: Final = 60.0
_CACHED: Final = 200
"""Pages that are kept until the bell rings again."""
_THEMES: Final = ("system", "light", "dark")
_STATIC: Final = {
    "dashboard.css": "text/css; charset=utf-8",
    "views.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "favicon.svg": "image/svg+xml",
}
SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_OPEN: Final = frozenset({"/healthz", "/readyz", "/login"})
"""Paths that need no authentication, and tell nothing. Static files are open, too."""


class App:
    """The dashboard as an ASGI app. It needs Trio; an ASGI server on asyncio cannot run it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._settings: Dashboard = desk.settings
        self._cache: dict[tuple[str, ...], View] = {}
        self._cached_at = -1
        self._navigation = [page.nav for page in PAGES if page.nav is not None]
        own = [
            *(Route("GET", path, handler) for path, handler in health_routes(desk).items()),
            Route("GET", "/static/{name}", self._static),
            Route("GET", "/events", self._events),
            Route("GET", "/login", self._login_page),
            Route("POST", "/login", self._login),
            Route("POST", "/logout", self._logout),
            Route("POST", "/theme", self._theme),
        ]
        pages = [Route("GET", page.path, partial(self._view, page)) for page in PAGES]
        actions = [Route("POST", each.path, partial(self._act, each)) for each in ACTIONS]
        self._router = Router([*own, *pages, *actions])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise TypeError(f"the dashboard does not speak {scope['type']}")
        request = _request(scope, receive)
        response = await self._respond(request)
        response.add(SECURITY)
        await response.send_to(receive, send)

    async def _respond(self, request: Request) -> Response:
        limit = VIEW_SECONDS if request.method in {"GET", "HEAD"} else ACTION_SECONDS
        try:
            with trio.fail_after(limit):
                return await self._route(request)
        except HttpError as exc:
            return self._error(request, exc.status, exc.text, exc.headers)
        except (trio.TooSlowError, DurableError, psycopg.Error) as exc:
            status, text = _failure(exc)
            return self._error(request, status, text)
        except Exception:
            logger.exception("the dashboard could not answer %s %s", request.method, request.path[:200])
            return self._error(request, 500, "a bug of the dashboard: its log has the details")

    async def _route(self, request: Request) -> Response:
        handler, parts = self._router.find(request.method, request.path)
        if request.path not in _OPEN and not request.path.startswith("/static/"):
            challenge = await check_access(request, self._settings, _action_of(handler))
            if challenge is not None:
                return self._challenged(request, challenge)
        return await handler(request, **parts)

    # -- pages and actions

    async def _view(self, page: Page, request: Request, **parts: Any) -> Response:
        view = await self._cached_view(page, request, parts)
        return self._shown(request, view)

    async def _cached_view(self, page: Page, request: Request, parts: Mapping[str, Any]) -> View:
        """A live update of a page is read once per ring, however many look at it."""
        if "x-live" not in request.headers:
            return await page.view(self.desk, request, **parts)
        rung = self.desk.sampler.bell.rung
        if rung != self._cached_at or len(self._cache) > _CACHED:
            self._cache, self._cached_at = {}, rung
        query = request.scope.get("query_string", b"").decode("latin-1")
        key = (request.path, query, request.role, str(request.user))
        if key not in self._cache:
            self._cache[key] = await page.view(self.desk, request, **parts)
        return self._cache[key]

    async def _act(self, action: Action, request: Request, **parts: Any) -> Response:
        form = Form(await request.form())
        named = form.get(action.names_command) if action.names_command else ""
        if named:  # which command it is, only the form says
            await check_access(request, self._settings, named)
        done = await action.act(self.desk, request, form, **parts)
        if done.view is not None:
            return self._shown(request, done.view)
        return self._done(request, done)

    def _done(self, request: Request, done: Done) -> Response:
        if request.wants_json:
            return Response(render.as_json({"ok": True, **done.data}), content_type="application/json")
        return redirect(link(request.root, _local(done.to), **done.query))

    def _shown(self, request: Request, view: View, status: int = 200) -> Response:
        if request.wants_json:
            return Response(render.as_json(view.data), status=status, content_type="application/json")
        return Response(self._html(request, view), status=status)

    def _html(self, request: Request, view: View) -> str:
        theme = request.cookies.get("theme", "system")
        return render.page(
            view.template,
            {
                **view.data,
                **view.extra,
                "view": view,
                "root": request.root,
                "path": request.path,
                "here": link(request.root, request.path, **request.query),
                "params": request.query,
                "navigation": self._navigation,
                "theme": theme if theme in _THEMES else "system",
                "user": request.user,
                "operator": request.role == "operator",
                "settings": self._settings,
                "schema": self.desk.schema,
                "sample": self.desk.sampler.latest,
                "trouble": self.desk.sampler.trouble,
            },
        )

    def _error(
        self, request: Request, status: int, text: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        data = {"error": text, "status": status}
        view = View(template="error.html", title=_TITLES.get(status, "Error"), data=data, live=False)
        response = self._shown(request, view, status)
        response.add(headers or {})
        return response

    # -- login

    def _challenged(self, request: Request, challenge: Challenge) -> Response:
        if challenge.basic:
            realm = {"WWW-Authenticate": 'Basic realm="durable_actors", charset="UTF-8"'}
            return self._error(request, 401, "log in with your name and password", realm)
        if request.wants_json or request.method not in {"GET", "HEAD"}:
            return self._error(
                request, 401, "show the token: Authorization: Bearer …", {"WWW-Authenticate": "Bearer"}
            )
        return redirect(link(request.root, "/login", next=link("", request.path, **request.query)))

    async def _login_page(self, request: Request) -> Response:
        data = {"next": _local(request.query.get("next", "/"))}
        return self._shown(request, View(template="login.html", title="Log in", data=data, live=False))

    async def _login(self, request: Request) -> Response:
        check_origin(request)
        form = Form(await request.form())
        shown, to = form.get("token"), _local(form.get("next", "/"))
        for token in (self._settings.token, self._settings.viewer_token):
            if token is not None and same(shown, token):
                cookie = f"{COOKIE}={session_of(token)}; Path=/; HttpOnly; SameSite=Strict"
                return redirect(link(request.root, "") + to, headers=[("Set-Cookie", cookie)])
        await trio.sleep(0.5)  # a guess costs time
        data = {"next": to, "failed": True}
        return self._shown(request, View(template="login.html", title="Log in", data=data, live=False), 401)

    async def _logout(self, request: Request) -> Response:
        gone = f"{COOKIE}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"
        return redirect(link(request.root, "/login"), headers=[("Set-Cookie", gone)])

    # -- the rest

    async def _theme(self, request: Request) -> Response:
        form = Form(await request.form())
        to = form.get("theme")
        cookie = f"theme={to if to in _THEMES else 'system'}; Path=/; Max-Age=31536000; SameSite=Strict"
        return redirect(request.root + _local(form.get("next", "/")), headers=[("Set-Cookie", cookie)])

    async def _events(self, request: Request) -> Response:  # noqa: ARG002 - a handler's signature
        return BellStream(self.desk.sampler.bell)

    async def _static(self, request: Request, name: str) -> Response:
        if name not in _STATIC:
            raise HttpError(404, "there is no such file")
        tag = f'"{hashlib.sha256(_static_file(name)).hexdigest()[:20]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status=304, headers=[("ETag", tag)])
        headers = [("ETag", tag), ("Cache-Control", "no-cache")]
        return Response(_static_file(name), content_type=_STATIC[name], headers=headers)


_TITLES: Final = {
    400: "That does not work",
    401: "Log in",
    403: "Not allowed",
    404: "Not found",
    409: "Conflict",
    503: "No database",
    504: "Too slow",
}


def _failure(error: Exception) -> tuple[int, str]:
    """The status and the text for an error that is not a bug. Pure."""
    match error:
        case trio.TooSlowError() | psycopg.errors.QueryCanceled():
            return 504, "the database took too long to answer"
        case StoreUnavailable() | psycopg.OperationalError():
            return 503, f"the database is not available: {error}"
        case NoTarget():
            return 404, str(error)
        case ConfigError():
            return 400, str(error)
        case _:  # a conflict, or something that Postgres refuses
            return 409, str(error)


def _action_of(handler: Handler) -> str | None:
    """The command that a handler gives; None if it only reads."""
    given: tuple[object, ...] = handler.args if isinstance(handler, partial) else ()
    return given[0].name if given and isinstance(given[0], Action) else None


def _request(scope: Scope, receive: Receive) -> Request:
    root = str(scope.get("root_path", "")).rstrip("/")
    raw = scope.get("raw_path")  # a name in a path may contain a slash, which only the quoted path shows
    path = quote(str(scope["path"])) if raw is None else raw.partition(b"?")[0].decode("latin-1")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :] or "/"  # some servers and proxies leave the prefix in the path
    api = path == API or path.startswith(API + "/")
    if api:
        path = path[len(API) :] or "/"
    headers = {name: value for name, value in scope["headers"] if name == b"accept"}
    accepts = headers.get(b"accept", b"").partition(b",")[0].strip() == b"application/json"
    return Request(scope, receive, path, wants_json=api or accepts)


def _local(path: str) -> str:
    """A path within the dashboard, or the first page: a form must not send its user elsewhere."""
    fine = (
        path.startswith("/") and not path.startswith(("//", "/\\")) and path.isascii() and path.isprintable()
    )
    return path if fine else "/"


_FILES: dict[str, bytes] = {}


def _static_file(name: str) -> bytes:
    if name not in _FILES:
        _FILES[name] = files("durable_actors.dashboard").joinpath("static", name).read_bytes()
    return _FILES[name]


async def _lifespan(receive: Receive, send: Send) -> None:
    """Some ASGI servers announce their start and end."""
    while True:
        message = await receive()
        kind = message["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
