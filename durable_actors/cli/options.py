"""Options and argument types that several commands share, and the connection to the database."""

from __future__ import annotations

import getpass
import importlib
import logging
import os
import re
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from durable_actors._option_fields import Kind, options_of
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.target import open_target
from durable_actors._store.migrate import require_schema
from durable_actors.config import Config
from durable_actors.errors import ConfigError, UnknownMachine
from durable_actors.machine import MachineSpec, current_registry, decode_json, spec_of

_F = TypeVar("_F", bound=Callable[..., Any])

_OURS: Final = Path(__file__).parent.parent
_OPTIONS: Final = options_of(Config)
_ENVIRONMENT: Final = {"schema": "DURABLE_SCHEMA"}
"""Environment variables that only the command line reads."""


def config_option(name: str) -> Callable[[_F], _F]:
    """Add the flag of an option of `Config`. Type, default and help come from its field."""
    option = _OPTIONS[name]
    names = [option.flag, name]
    if option.kind == "flag":
        on, _, off = option.flag.partition("/")
        return click.option(
            *names,
            default=option.default,
            help=f"{_plain(option.meaning)} Default: {on if option.default else off}.",
        )
    parse, metavar = _PARSERS.get(option.kind, (str, "DSN" if name.endswith("dsn") else "NAME"))
    envvar = _ENVIRONMENT.get(name)
    fallback = f"${envvar}, else " if envvar else ""
    return click.option(
        *names,
        type=parse,
        metavar=metavar,
        envvar=envvar,
        default=option.default,
        help=f"{_plain(option.meaning)} Default: {fallback}{_plain(option.default_words)}.",
    )


def _plain(text: str) -> str:
    """Turn a text of the reference into help: flags instead of option names, no backquotes."""
    return re.sub(r"`([^`]*)`", lambda match: _flag(match[1]) or match[1], text)


def _flag(name: str) -> str:
    return _OPTIONS[name].flag if name in _OPTIONS else ""


def config_options(function: _F) -> _F:
    """Add every option of `Config` that has a flag."""
    for name, option in reversed(_OPTIONS.items()):
        if option.flag:
            function = config_option(name)(function)
    return function


def database_options(function: _F) -> _F:
    """Add `--dsn` and `--schema`."""
    function = config_option("schema")(function)
    return config_option("dsn")(function)


def json_option(function: _F) -> _F:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def command_options(function: _F) -> _F:
    """Add what every command says about itself: `--by`, `--reason`, `--idempotency-key`."""
    function = click.option(
        "--idempotency-key",
        metavar="KEY",
        help="With the same key, the command is carried out only once on each target.",
    )(function)
    return by_options(function)


def by_options(function: _F) -> _F:
    """Add who and why: `--by`, `--reason`."""
    function = click.option("--reason", metavar="TEXT", help="Why, for the receipt.")(function)
    return click.option(
        "--by", metavar="NAME", default=_user, help="Who gives the command, for the receipt. Default: you."
    )(function)


def _user() -> str | None:
    """The user of the operating system; None for one without a name, as in a container."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def make_config(dsn: str | None, schema: str) -> Config:
    """Return the validated settings of a command."""
    return Config(dsn=dsn, schema=schema)


@asynccontextmanager
async def open_store(dsn: str | None, schema: str) -> AsyncGenerator[PgConn, None]:
    """Open a connection to a database whose schema exists, for commands that read, or change a given row."""
    config = make_config(dsn, schema)
    # Commands that only read do not warn about the embedded server; serve, insert, signal and migrate do.
    async with open_target(config.dsn, level=logging.INFO) as target:
        conn = await PgConn.open(target.dsn)
        try:
            await require_schema(conn, schema=config.schema)
            yield conn
        finally:
            conn.close()


@contextmanager
def bare_errors() -> Generator[None, None, None]:
    """Unwrap an exception group of a nursery that contains a single error, such as a DurableError or Ctrl-C."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _alone(group) from None


def _alone(error: BaseException) -> BaseException:
    """Return the only error inside nested groups, or the group itself if there are several."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return _alone(inner[0]) if len(inner) == 1 else error


_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)", re.ASCII)


def duration(text: str) -> float:
    """Parse seconds, or a number with a unit: 90, 500ms, 90s, 5m, 2h, 1d. For `type=` of options."""
    match = _DURATION.fullmatch(str(text).strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration, such as 90, 500ms, 90s, 5m, 2h or 1d")
    return float(match[1]) * _UNITS[match[2]]


_PARSERS: Final[dict[Kind, tuple[Callable[[str], Any], str]]] = {
    "duration": (duration, "DURATION"),
    "number": (int, "N"),
}
"""The `type=` and the placeholder of each kind of option."""


class Whole(click.IntRange):
    """A whole number within bounds. For `type=` of options."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a number; the error message gives the bounds."""
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or number < (self.min or 0) or (self.max is not None and number > self.max):
            bounds = f"from {self.min}" + ("" if self.max is None else f" to {self.max}")
            self.fail(f"{value!r} is not a whole number {bounds}", param, ctx)
        return number


def read_json(argument: str | None, *, option: str) -> Any:
    """Parse the JSON of an argument; `-` reads standard input. Returns None for a missing argument."""
    if argument is None:
        return None
    text = sys.stdin.read() if argument == "-" else argument
    try:
        return decode_json(text.encode("utf-8", "surrogateescape"), what=option)
    except ValueError as exc:
        hint = "" if text.lstrip()[:1] in {"{", "[", '"'} else " (quote a text like this: '\"text\"')"
        raise click.UsageError(f"{_one_line(exc)}{hint}") from None


def read_target(text: str, *, as_key: bool) -> int | str:
    """Parse the target of a command: digits are an id, anything else is a unique key."""
    if not as_key and text.isascii() and text.isdigit():
        number = int(text) if len(text) < 100 else 0  # int() raises for 5,000 digits
        if not 0 < number < 2**63:
            raise ConfigError(f"{text[:100]} is not an instance id", option="target", value=text)
        return number
    return text


def key_bytes(text: str) -> bytes:
    """Return a unique key as it was typed; bytes that are not UTF-8 are preserved."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ConfigError(f"{text!r} contains lone surrogates", option="key", value=text) from None


def import_modules(names: Iterable[str], *, verbose: bool) -> None:
    """Import modules, which registers their machines. A failure prints one line, and a traceback with -v."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - as `python -m` does
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    for name in names:
        if name.endswith(".py") or "/" in name:
            dotted = name.removesuffix(".py").strip("./").replace("/", ".")
            raise ConfigError(
                f"{name!r} is the name of a file; give the name of the module: {dotted}", option="module"
            )
        try:
            importlib.import_module(name)
        except Exception as exc:  # user code may raise anything
            if verbose:
                traceback.print_exc()
            raise ConfigError(f"cannot import {name!r}: {_where(exc)}", option="module", value=name) from exc


def find_machine(machine: str, modules: tuple[str, ...], *, verbose: bool) -> MachineSpec:
    """Return the machine or job of a name that a user has typed; import its module, if that is part of the name.

    `shop.machines:Checkout` is also the place of a class or function that has another name (`name="shop:checkout"`).
    """
    module, colon, place = machine.partition(":")
    if not modules and colon:
        modules = (module,)
    import_modules(modules, verbose=verbose)
    try:
        return current_registry().find(machine)
    except UnknownMachine as exc:
        defined = spec_of(_at(module, place)) if colon else None
        if defined is not None:
            return defined
        if modules:
            raise
        raise UnknownMachine(
            f"machine {machine!r} is unknown: give its module (--module shop.machines), or a name in the form "
            "shop.machines:Checkout"
        ) from exc


def _at(module: str, place: str) -> object:
    """Return the object at a place of an imported module, such as `Outer.Checkout`; None if there is none."""
    found: object = sys.modules.get(module)
    for name in place.split("."):
        found = getattr(found, name, None)
    return found


def _where(error: Exception) -> str:
    """Return the error as one line, with the file and line where it was raised."""
    text = f"{type(error).__name__}: {_one_line(error)}"
    if isinstance(error, ModuleNotFoundError | SyntaxError):  # their message has the place, or there is none
        return text
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if not Path(frame.filename).is_relative_to(_OURS)] or every
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}; -v shows more)" if frames else ""
    return text + place


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
