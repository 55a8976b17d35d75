"""How a failure is stored and shown: its text (`last_error`), its class and its traceback."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final, cast

from durable_actors._option_checks import SafeRepr

MAX_TEXT = 10_000
"""The longest `last_error`, in characters. The log has the complete error."""

MAX_TRACEBACK: Final = 16_000
"""The longest stored traceback, in bytes. A longer one is stored without its middle."""
_TRACEBACK_HEAD: Final = 5_000
_LIBRARY_PATHS: Final = (
    f"{Path(__file__).parent.parent}/",
    "/site-packages/trio/",
    "/site-packages/outcome/",
)

MAX_DEPTH: Final = 10
"""How many levels of nested exception groups are shown."""

_repr = SafeRepr(2_000)
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 50


def reason_text(reason: object) -> str:
    """Return the text of a reason for `last_error`: never empty and always storable. Never raises.

    An exception gives `module.Class: text` and its notes; an exception group lists its members. A text is unchanged.
    """
    if isinstance(reason, str):
        text = reason
    elif isinstance(reason, BaseException):
        try:
            text = _exception_text(reason)
        except Exception:  # noqa: BLE001 - notes that raise, or endlessly nested groups
            text = f"{error_type(reason)}: (its text cannot be shown)"
    else:
        text = _repr.repr(reason)
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    return _storable(text) or "(no reason given)"


def error_type(error: BaseException) -> str:
    """Return the text for the column `error_type`: `module.Class`, or `Class` for builtins, as in a traceback."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return _storable(name[:500])


def traceback_text(error: BaseException) -> str | None:
    """Return the text for the column `traceback`, from the user's first frame on, or None. Never raises."""
    if is_deep(error):
        return None
    try:
        formatted = traceback.TracebackException.from_exception(error, compact=True)
        _drop_our_frames(formatted)
        text = "".join(formatted.format())
    except Exception:  # noqa: BLE001 - an exception that cannot be formatted; its text is stored
        return None
    return _cut(_storable(text))


def _drop_our_frames(formatted: traceback.TracebackException) -> None:
    """Drop the frames before the user's code. If there are no others (an invalid outcome), keep them."""
    ours = 0
    while ours < len(formatted.stack) and formatted.stack[ours].filename.startswith(_LIBRARY_PATHS[0]) | any(
        part in formatted.stack[ours].filename for part in _LIBRARY_PATHS[1:]
    ):
        ours += 1
    if ours < len(formatted.stack):
        del formatted.stack[:ours]


def _cut(text: str) -> str:
    raw = text.encode()
    if len(raw) <= MAX_TRACEBACK:
        return text
    head = raw[:_TRACEBACK_HEAD].decode(errors="ignore")
    tail = raw[len(raw) - (MAX_TRACEBACK - _TRACEBACK_HEAD - 100) :].decode(errors="ignore")
    left_out = len(raw) - len(head.encode()) - len(tail.encode())
    return f"{head}\n  [… {left_out} bytes left out …]\n{tail}"


def _storable(text: str) -> str:
    """Escape NUL and surrogates, which a Postgres text cannot contain."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _exception_text(error: BaseException, depth: int = 0) -> str:
    if not isinstance(error, BaseExceptionGroup):
        # The formatter of traceback handles an exception whose __str__ raises.
        formatted = traceback.TracebackException(type(error), error, None, compact=True)
        return "".join(formatted.format_exception_only()).strip()
    # Not used for a group: it would format all members again at every level.
    group = cast("BaseExceptionGroup[BaseException]", error)
    notes: list[str] = getattr(group, "__notes__", [])
    parts = ["\n".join([f"{error_type(group)}: {group}", *notes])]
    if depth == MAX_DEPTH:
        return f"{parts[0]} …"
    for index, inner in enumerate(group.exceptions, 1):
        parts.append(f"  {index}. " + _exception_text(inner, depth + 1).replace("\n", "\n     "))
    return "\n".join(parts)


def is_deep(error: BaseException) -> bool:
    """Return whether its groups are nested so deeply that formatting it would block the event loop for seconds."""
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
    """Return the error for the `exc_info` of a log record, or None if formatting it would take seconds."""
    return None if error is None or is_deep(error) else error
