"""The text of a failure, as it is stored in `last_error` and shown to people."""

from __future__ import annotations

import traceback
from typing import cast

from durable_actors._option_checks import SafeRepr

MAX_TEXT = 10_000
"""Characters. Enough to see what happened; the log has the rest."""

_repr = SafeRepr(2_000)
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 50


def reason_text(reason: object) -> str:
    """Return what `last_error` stores for a reason: never empty, always storable, and this never raises.

    An exception gives `module.Class: text` and its notes; a group lists what is in it. A text stays as it is.
    """
    if isinstance(reason, str):
        text = reason
    elif isinstance(reason, BaseException):
        text = _exception_text(reason)
    else:
        text = _repr.repr(reason)
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    # Postgres text holds neither NUL nor surrogates.
    text = text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
    return text or "(no reason given)"


def _exception_text(error: BaseException) -> str:
    # traceback's own formatter survives an exception whose __str__ raises.
    text = "".join(
        traceback.TracebackException(type(error), error, None, compact=True).format_exception_only()
    ).strip()
    if isinstance(error, BaseExceptionGroup):
        parts = [text]
        group = cast("BaseExceptionGroup[BaseException]", error)
        for index, inner in enumerate(group.exceptions, 1):
            parts.append(f"  {index}. " + _exception_text(inner).replace("\n", "\n     "))
        text = "\n".join(parts)
    return text
