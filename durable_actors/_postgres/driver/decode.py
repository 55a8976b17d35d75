"""Columns as Postgres text, read back: array literals. The inverse of `encode`."""

from __future__ import annotations

import re
from typing import Final

# One element: quoted (with backslash escapes), or bare up to the next comma.
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}]+)', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)


def decode_text_array(value: bytes) -> tuple[str, ...]:
    """Read a one-dimensional text array literal without NULLs: `{a,"b c"}`."""
    return tuple(
        _ESCAPE.sub(r"\1", match[1]) if match[1] is not None else match[2]
        for match in _ELEMENT.finditer(value.decode()[1:-1])
    )


def decode_nullable_array(literal: str) -> list[str | None]:
    """Read an array literal as `encode` writes them: what is not quoted and says NULL is None."""
    return [
        _ESCAPE.sub(r"\1", match[1]) if match[1] is not None else None if match[2] == "NULL" else match[2]
        for match in _ELEMENT.finditer(literal[1:-1])
    ]
