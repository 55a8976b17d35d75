"""HTML and JSON of what views return. Data is shown as data: escaped, control characters visible, long texts cut."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from math import floor, isfinite
from typing import Any, Final, cast
from urllib.parse import urlencode

import attrs
import jinja2
import msgspec
from markupsafe import Markup, escape

from durable_actors._version import __version__
from durable_actors._wording import counted, seconds
from durable_actors.dashboard.web import link, segment

LONGEST: Final = 20_000
"""Characters of a JSON value that a page shows; the JSON twin has all of it."""
DEEPEST: Final = 200
"""Levels of a JSON value that the JSON twin has."""
_UNSEEN: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


@cache
def environment() -> jinja2.Environment:
    """The templates of this package, with every value escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("durable_actors.dashboard"),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "duration": seconds,
        "ago": ago,
        "instant": instant,
        "lasting": lasting,
        "soon": soon,
        "tokens": tokens,
        "pretty": pretty,
        "cut": cut,
        "plainly": plainly,
        "visible": visible,
        "line": one_line,
        "counted": counted,
        "number": number,
        "capped": capped,
        "words": status_words,
        "sentence": sentence,
        "coded": coded,
        "without_class": without_class,
        "segment": segment,
        "query": urlencode,
    }
    made.filters.update(filters)
    names: dict[str, Any] = {"version": __version__, "link": link}
    made.globals.update(names)
    return made


def _shown(value: object) -> object:
    """What every expression of a template goes through, before it is escaped: no character is hidden."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def page(template: str, values: Mapping[str, Any]) -> str:
    """Render a template."""
    return environment().get_template(template).render(values)


# -- JSON


def as_json(value: object) -> bytes:
    """Encode what a view returns. Integers stay exact; floats that JSON does not know are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=plain, indent=1, allow_nan=False)
    except (RecursionError, ValueError):  # rare enough for a second look at every value
        text = json.dumps(_plainest(value), ensure_ascii=False, indent=1)
    return text.encode("utf-8", "backslashreplace")


def _plainest(value: object, depth: int = 0) -> object:
    """A value that every decoder reads: no infinite number, and not nested too deeply."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if depth >= DEEPEST:
        return "(nested too deeply to be shown)"
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, Mapping):
        found = cast("Mapping[object, object]", value)
        return {str(name): _plainest(each, depth + 1) for name, each in found.items()}
    if isinstance(value, list | tuple):
        return [_plainest(each, depth + 1) for each in cast("Sequence[object]", value)]
    return _plainest(plain(value), depth + 1)


def plain(value: object) -> Any:
    """One value as JSON's types; the encoder calls it again for the parts."""
    kind: type[Any] = type(value)
    if attrs.has(kind):
        found = {each.name: getattr(value, each.name) for each in attrs.fields(kind)}
        return {name: _finite(each) for name, each in found.items()}
    if isinstance(value, msgspec.Struct):
        return {name: _finite(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, Mapping):
        return dict(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    if isinstance(value, set | frozenset):
        return sorted(value)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    raise TypeError(f"{kind.__name__} is not JSON")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not isfinite(value) else value


# -- filters


def visible(text: object) -> str:
    """A text in which no character is hidden: control characters and marks of direction are shown as escapes."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def one_line(value: object, limit: int = 120) -> str:
    """A value on one line, cut at `limit`."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=plain)
    text = visible(" ".join(text[: limit * 4].split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def pretty(value: object, limit: int = LONGEST) -> str:
    """A JSON value over several lines, cut at `limit` characters; it says how much is missing."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=plain, indent=2)
    except RecursionError:
        text = "(nested too deeply to be shown)"
    return cut(text, limit)


def plainly(value: object, limit: int = LONGEST) -> str:
    """As `pretty`; a text of several lines, such as a traceback, as it is."""
    return cut(value, limit) if isinstance(value, str) and "\n" in value else pretty(value, limit)


def cut(text: str, limit: int = LONGEST) -> str:
    """A text over several lines, cut at `limit` characters; it says how much is missing."""
    left = len(text) - limit
    return visible(text) if left <= 0 else f"{visible(text[:limit])}\n… and {left} characters more"


def ago(value: datetime | None) -> Markup | str:
    """How long ago an instant was, or how far it is ahead; the exact time in UTC on hover."""
    if value is None:
        return ""
    passed = (datetime.now(UTC) - value).total_seconds()
    words = f"{seconds(passed)} ago" if passed >= 0 else f"in {seconds(-passed)}"
    return _time(value, words)


def lasting(value: datetime | None) -> Markup | str:
    """For how long something has been so that began at an instant."""
    if value is None:
        return ""
    return _time(value, seconds(max((datetime.now(UTC) - value).total_seconds(), 0.0)))


def soon(value: datetime | None) -> Markup | str:
    """When something is due: "now" if its instant has passed."""
    if value is None:
        return ""
    return _time(value, "now") if value <= datetime.now(UTC) else ago(value)


def tokens(value: float | None) -> str:
    """Tokens of a limit, which may be fractions; rounded down, because a part of a token lets nothing begin."""
    return "–" if value is None else f"{floor(value * 10 + 1e-6) / 10:,.1f}".removesuffix(".0")


def instant(value: datetime | None) -> Markup | str:
    """An instant in UTC."""
    return "" if value is None else _time(value, f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S}")


def _time(value: datetime, words: str) -> Markup:
    exact = value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return Markup('<time datetime="{0}" title="{0}">{1}</time>').format(exact, words)


def number(value: float | None) -> str:
    """A number with separators; one decimal below 10 if it is not whole."""
    if value is None:
        return "–"
    if abs(value) < 10 and value != int(value):
        return f"{value:.1f}"
    return f"{value:,.0f}"


def capped(value: int | None, cap: int = 10_001) -> str:
    """A count that ends at a cap: 10k+ says that there are more."""
    if value is None:
        return "–"
    return f"{(cap - 1) // 1000}k+" if value >= cap else number(value)


_WORDS: Final = {
    "awaiting_signal": "awaits signal",
    "awaiting_children": "awaits children",
}


def sentence(text: str) -> str:
    """A text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def coded(text: str) -> Markup:
    """A sentence in which what stands between backticks is shown as code."""
    if text.count("`") % 2:
        return escape(text)
    parts = [
        Markup("<code>{}</code>").format(each) if at % 2 else escape(each)
        for at, each in enumerate(text.split("`"))
    ]
    return Markup("").join(parts)


def without_class(text: str, error_type: str | None) -> str:
    """The text of an error without the class in front of it, which is shown beside it."""
    return text.removeprefix(f"{error_type}: ") if error_type else text


def status_words(status: str) -> str:
    """A status for people."""
    return _WORDS.get(status, status)
