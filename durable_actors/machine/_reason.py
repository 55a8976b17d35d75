"""A failure as it is stored and shown to people: its text (`last_error`), its class, its traceback."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final, cast

from durable_actors._option_checks import SafeRepr

MAX_TEXT = 10_000
"""Characters. Enough to see what happened; the log has the rest."""

MAX_TRACEBACK: Final = 16_000
"""Bytes of a stored traceback: its head and its tail; what lies between is left out."""
_HEAD: Final = 5_000
_OURS: Final = (f"{Path(__file__).parent.parent}/", "/site-packages/trio/", "/site-packages/outcome/")

MAX_DEPTH: Final = 10
"""Groups in groups that are shown."""

_repr = SafeRepr(2_000)
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 50


def reason_text(reason: object) -> str:
    """Return what `last_error` stores for a reason: never empty, always storable, and this never raises.

    An exception gives `module.Class: text` and its notes; a group lists what is in it. A text stays as it is.
    """
    if isinstance(reason, str):
        text = reason
    elif isinstance(reason, BaseException):
        try:
            text = _exception_text(reason)
        except Exception:  # noqa: BLE001 - a hostile exception (its notes raise), or groups in groups without end
            text = f"{error_type(reason)}: (its text cannot be shown)"
    else:
        text = _repr.repr(reason)
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    return _storable(text) or "(no reason given)"


def error_type(error: BaseException) -> str:
    """Return what `error_type` stores: `module.Class`, without the module for builtins, as a traceback says it."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return _storable(name[:500])


def traceback_text(error: BaseException) -> str | None:
    """Return what `traceback` stores, from the user's first frame on; None when there is none. This never raises."""
    if is_deep(error):
        return None
    try:
        told = traceback.TracebackException.from_exception(error, compact=True)
        _drop_our_frames(told)
        text = "".join(told.format())
    except Exception:  # noqa: BLE001 - a hostile exception; its text is stored all the same
        return None
    return _cut(_storable(text))


def _drop_our_frames(told: traceback.TracebackException) -> None:
    """Drop the frames before the user's code. Where all frames are ours (an invalid outcome), they stay."""
    ours = 0
    while ours < len(told.stack) and told.stack[ours].filename.startswith(_OURS[0]) | any(
        part in told.stack[ours].filename for part in _OURS[1:]
    ):
        ours += 1
    if ours < len(told.stack):
        del told.stack[:ours]


def _cut(text: str) -> str:
    raw = text.encode()
    if len(raw) <= MAX_TRACEBACK:
        return text
    head = raw[:_HEAD].decode(errors="ignore")
    tail = raw[len(raw) - (MAX_TRACEBACK - _HEAD - 100) :].decode(errors="ignore")
    left_out = len(raw) - len(head.encode()) - len(tail.encode())
    return f"{head}\n  [… {left_out} bytes are left out …]\n{tail}"


def _storable(text: str) -> str:
    """Postgres text holds neither NUL nor surrogates."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _exception_text(error: BaseException, depth: int = 0) -> str:
    if not isinstance(error, BaseExceptionGroup):
        # traceback's own formatter survives an exception whose __str__ raises.
        told = traceback.TracebackException(type(error), error, None, compact=True)
        return "".join(told.format_exception_only()).strip()
    # Not for a group: it would format everything inside, at every level again.
    group = cast("BaseExceptionGroup[BaseException]", error)
    notes: list[str] = getattr(group, "__notes__", [])
    parts = ["\n".join([f"{error_type(group)}: {group}", *notes])]
    if depth == MAX_DEPTH:
        return f"{parts[0]} …"
    for index, inner in enumerate(group.exceptions, 1):
        parts.append(f"  {index}. " + _exception_text(inner, depth + 1).replace("\n", "\n     "))
    return "\n".join(parts)


def is_deep(error: BaseException) -> bool:
    """Whether groups are nested in it so deeply that to format its traceback would stop the event loop for seconds."""
    level: list[BaseException] = [error]
    for _ in range(MAX_DEPTH + 1):
        groups = [
            cast("BaseExceptionGroup[BaseException]", each)
            for each in level
            if isinstance(each, BaseExceptionGroup)
        ]
        level = [inner for group in groups for inner in group.exceptions]
        if not level:
            return False
    return True


def shown_error(error: BaseException | None) -> BaseException | None:
    """What a log record is given as `exc_info`: the error, unless to format it would take seconds."""
    return None if error is None or is_deep(error) else error
