"""Who may do what: authentication, roles, and requests that another site has forged. Decisions are pure functions."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
from typing import Final

import attrs

from durable_actors.dashboard.web import HttpError, Request
from durable_actors.dashboard_options import Access, AccessRequest, Dashboard, is_loopback

COOKIE: Final = "durable_actors_session"
_OPERATOR: Final = Access(None, "operator")


@attrs.frozen
class Challenge:
    """Nobody is known: how they can say who they are."""

    basic: bool
    """Whether names and passwords are asked for; else a token, on the login page."""


async def check_access(request: Request, settings: Dashboard, action: str | None) -> Challenge | None:
    """Set user and role of a request. Raises `HttpError` 403 for what is forbidden; returns how to log in if unknown.

    `action` is the command that is asked for; None to read. What `authorize` raises is an error of its author: 500.
    """
    check_host(request, settings)
    found = _known(request, settings)
    if settings.authorize is not None:
        asked = AccessRequest(
            method=request.method,
            path=request.path,
            headers=request.headers,
            client=_client(request),
            action=action,
        )
        answer = settings.authorize(asked)
        found = await answer if inspect.isawaitable(answer) else answer
        if found is not None and not isinstance(found, Access):
            raise TypeError(f"authorize returned {found!r}: return an Access, or None for no")
        if found is None:
            raise HttpError(403, "you may not see this")
    elif found is None:
        return Challenge(basic=bool(settings.users or settings.viewers))
    request.user, request.role = found.user, "viewer" if settings.read_only else found.role
    if request.method not in {"GET", "HEAD"}:
        check_origin(request)
    if action is not None and request.role != "operator":
        text = "this dashboard is read-only" if settings.read_only else "only operators may do this"
        raise HttpError(403, text)
    return None


def _client(request: Request) -> str | None:
    peer = request.scope.get("client")
    return None if not peer else str(peer[0])


def _known(request: Request, settings: Dashboard) -> Access | None:
    """Who a request comes from, by what it shows; None if nobody is known. Pure."""
    if not settings.has_auth:
        return _OPERATOR
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    cookie = request.cookies.get(COOKIE, "")
    if scheme.lower() == "basic":
        return _basic(shown, settings)
    for token, access in (
        (settings.token, Access("token", "operator")),
        (settings.viewer_token, Access("viewer token", "viewer")),
    ):
        if token is None:
            continue
        if scheme.lower() == "bearer" and same(shown, token):
            return access
        if cookie and same(cookie, session_of(token)):
            return access
    return None


def _basic(shown: str, settings: Dashboard) -> Access | None:
    try:
        name, colon, password = base64.b64decode(shown, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    found = None
    if colon:
        # Every password is compared, so that the time does not tell which names exist.
        for users, access in (
            (settings.viewers, Access(name, "viewer")),
            (settings.users, Access(name, "operator")),
        ):
            for user, secret in users.items():
                if same(name, user) & same(password, secret):
                    found = access
    return found


def same(one: str, other: str) -> bool:
    """Compare secrets in a time that does not depend on where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


def session_of(token: str) -> str:
    """The cookie of somebody who has shown the token. It does not reveal the token."""
    return hmac.new(token.encode(), b"durable_actors dashboard session", hashlib.sha256).hexdigest()


def check_host(request: Request, settings: Dashboard) -> None:
    """Without authentication, refuse names that are not this computer's: another site could resolve its own to it."""
    if settings.has_auth:
        return
    host = request.headers.get("host", "")
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    if not is_loopback(name):
        raise HttpError(421, "this dashboard answers to localhost only, unless it has a token or users")


def check_origin(request: Request) -> None:
    """Refuse what a page of another site has sent. Browsers say where a form comes from; other programs need not."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site != "same-origin":
        raise HttpError(403, "this form comes from another site")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise HttpError(403, "this form comes from another site")
