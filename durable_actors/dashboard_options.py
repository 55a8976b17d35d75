"""`Dashboard`: the settings of a dashboard. Frozen and checked once; nothing is imported that the extra installs."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, cast

import attrs

from durable_actors import _option_checks as check
from durable_actors._option_fields import AGE, FLAG, about, seconds, whole
from durable_actors.errors import ConfigError

Role = Literal["viewer", "operator"]
"""A viewer reads, an operator also gives commands."""
SHORTEST_TOKEN: Final = 16
"""Characters of a token or a password, at least: what is guessed protects nothing."""


@attrs.frozen
class Access:
    """Who asks, and what they may do: what `authorize=` returns."""

    user: str | None = None
    """For receipts (`by`) and the page."""
    role: Role = "viewer"


@attrs.frozen(kw_only=True)
class AccessRequest:
    """What `authorize=` is asked about."""

    method: str
    path: str
    """Below the prefix of the dashboard."""
    headers: Mapping[str, str]
    """By their names in lower case."""
    client: str | None
    """The address of the caller: that of a proxy, if there is one."""
    action: str | None
    """The command that is asked for, such as "retry"; None to read."""


Authorize = Callable[[AccessRequest], Any]
"""Returns an `Access`, or None for "no"; may be `async`."""
Redact = Callable[[str, str, Any], Any]
"""Called with a machine, what is shown ("state", "result", "signal", …) and its JSON value; returns what to show."""


def _secret(option: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) < SHORTEST_TOKEN:
        text = f"{option} must be a string of at least {SHORTEST_TOKEN} characters"
        raise ConfigError(text, option=option)
    return value


def _token(value: str | None) -> str | None:
    return _secret("token", value)


def _viewer_token(value: str | None) -> str | None:
    return _secret("viewer_token", value)


def _names(option: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{option} must map names to passwords", option=option)
    found: dict[str, str] = {}
    for name, password in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not name or ":" in name:
            raise ConfigError(f"{option}: {check.shown(name)} is not a name without a colon", option=option)
        if not isinstance(password, str) or not password:
            raise ConfigError(f"{option}: the password of {name!r} is not a string", option=option)
        found[name] = password
    return MappingProxyType(found)


def _users(value: Mapping[str, str]) -> Mapping[str, str]:
    return _names("users", value)


def _viewers(value: Mapping[str, str]) -> Mapping[str, str]:
    return _names("viewers", value)


def _sensitive(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else check.several("sensitive", value)  # type: ignore[arg-type]
    return tuple(check.name("sensitive", each) for each in names)


def _root_path(value: str) -> str:
    given: Any = value
    if not isinstance(given, str) or (given and not given.startswith("/")):
        text = f"root_path={check.shown(value)} must begin with a slash, such as /ops"
        raise ConfigError(text, option="root_path", value=value)
    return value.rstrip("/")


def _host(_self: object, _field: object, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"host={check.shown(value)} must be a name or an address", option="host")


def _callable(_self: object, field: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not callable(value):
        text = f"{field.name}={check.shown(value)} must be a function"
        raise ConfigError(text, option=field.name, value=value)


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach the address. Pure."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _hidden(value: object) -> str:
    return "None" if not value else "'…'"


@check.refuse_unknown_options
@attrs.frozen(kw_only=True)
class Dashboard:
    """Settings of a dashboard: `Config(dashboard=da.Dashboard(port=8765))`. Needs the extra `dashboard`.

    Without a token, users or `authorize`, everybody who reaches it is an operator; so it then listens only on an
    address of this computer.
    """

    host: str = attrs.field(
        default="127.0.0.1",
        validator=_host,
        metadata=about(
            "The address to listen on.",
            default="`127.0.0.1`: only this computer",
            values="a name or an address",
        ),
    )
    port: int = attrs.field(
        default=8765,
        validator=whole(0, 65535),
        metadata=about("The port; 0 takes a free one."),
    )
    token: str | None = attrs.field(
        default=None,
        converter=_token,
        repr=_hidden,
        metadata=about(
            "Operators show it: as `Authorization: Bearer`, or on the login page.",
            default="none",
            values="16 or more characters",
        ),
    )
    viewer_token: str | None = attrs.field(
        default=None,
        converter=_viewer_token,
        repr=_hidden,
        metadata=about("As `token`, for viewers.", default="none", values="16 or more characters"),
    )
    users: Mapping[str, str] = attrs.field(
        factory=dict[str, str],
        converter=_users,
        repr=_hidden,
        metadata=about(
            "Operators with their passwords, for HTTP basic authentication.",
            default="none",
            values="name to password",
        ),
    )
    viewers: Mapping[str, str] = attrs.field(
        factory=dict[str, str],
        converter=_viewers,
        repr=_hidden,
        metadata=about("As `users`, for viewers.", default="none", values="name to password"),
    )
    authorize: Authorize | None = attrs.field(
        default=None,
        validator=_callable,
        metadata=about(
            "Called with an `AccessRequest` for every request and every action; returns an `Access`, or None for no.",
            default="none",
            values="a function, which may be `async`",
        ),
    )
    read_only: bool = attrs.field(
        default=False, validator=FLAG, metadata=about("Refuse all commands, whoever asks.")
    )
    require_reason: bool = attrs.field(
        default=False, validator=FLAG, metadata=about("Refuse commands without a reason.")
    )
    sensitive: tuple[str, ...] = attrs.field(
        default=(),
        converter=_sensitive,
        metadata=about(
            'Names of fields, at any depth, whose values are shown as "[redacted]". Values of `password`, `token`, '
            "`api_key` and the like are never shown.",
            default="none",
            values="names",
        ),
    )
    redact: Redact | None = attrs.field(
        default=None,
        validator=_callable,
        metadata=about(
            'Called with a machine, what is shown ("state", "result", "signal", …) and its value; returns what to '
            "show.",
            default="none",
            values="a function",
        ),
    )
    root_path: str = attrs.field(
        default="",
        converter=_root_path,
        metadata=about(
            "The prefix of all links, behind a proxy, whether it removes it from the path or not.",
            default="none",
            values="a path, such as `/ops`",
        ),
    )
    interval: float = attrs.field(
        default=5,
        converter=seconds,
        validator=AGE,
        metadata=about("The time between two samples of queues and nodes, in the whole cluster."),
    )

    def __attrs_post_init__(self) -> None:
        """Refuse to be open to others without authentication."""
        if not self.has_auth and not is_loopback(self.host):
            raise ConfigError(
                f"host={self.host!r} can be reached from other computers, and everybody there could give commands: "
                "set token, users or authorize, or listen on 127.0.0.1",
                option="host",
                value=self.host,
            )

    @property
    def has_auth(self) -> bool:
        """Whether it asks who somebody is."""
        return bool(
            self.token or self.viewer_token or self.users or self.viewers or self.authorize is not None
        )
