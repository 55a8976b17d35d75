"""Secrets do not reach the journal: values under telling keys are replaced before a command is stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

REDACTED: Final = "[redacted]"

_SECRET: Final = re.compile(
    r"token|secret|passw(or)?d|passphrase|authorization|api[-_ ]?key|private[-_ ]?key|credential|cookie",
    re.IGNORECASE,
)


def redact(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which the values of secret keys, at any depth, are "[redacted]"."""
    return {key: REDACTED if _SECRET.search(key) else _inside(value) for key, value in metadata.items()}


def _inside(value: object) -> object:
    if isinstance(value, Mapping):
        return redact(cast("Mapping[str, Any]", value))
    if isinstance(value, list | tuple):
        return [_inside(each) for each in cast("list[object]", value)]
    return value
