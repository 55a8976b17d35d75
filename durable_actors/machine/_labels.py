"""Tags and meta of a new instance, for people and tools. The engine reads nothing of them but its own names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, TypeGuard

import attrs

from durable_actors._option_checks import shown
from durable_actors.errors import ConfigError, StateError
from durable_actors.machine._checks import MAX_NAME, text
from durable_actors.machine._codec import encode_json

MAX_TAGS: Final = 50
MAX_META: Final = 65_536
"""The largest `meta` in bytes of JSON. Larger data belongs in the state or elsewhere."""


@attrs.frozen
class Labels:
    """The tags and meta of an instance, ready to be stored."""

    tags: tuple[str, ...]
    """Each once, in the given order."""
    meta: bytes | None
    """A JSON object."""

    @property
    def size(self) -> int:
        """The approximate size in a statement, in bytes."""
        return sum(4 * len(tag) for tag in self.tags) + len(self.meta or b"")


def labels_of(tags: object, meta: object) -> Labels | None:
    """Check the options `tags` and `meta`; raise `ConfigError`. Returns None if there is nothing to store."""
    checked = _tags(tags)
    document = _meta(meta)
    return Labels(checked, document) if checked or document is not None else None


def _tags(tags: object) -> tuple[str, ...]:
    if tags is None:
        return ()
    if isinstance(tags, str):
        raise ConfigError(
            f"tags must be a list of texts, not one text: give [{shown(tags)}]", option="tags", value=tags
        )
    if not _is_collection(tags):
        raise ConfigError(f"tags must be a list of texts; it is {shown(tags)}", option="tags", value=tags)
    given = list(islice(tags, MAX_TAGS + 1))
    if len(given) > MAX_TAGS:
        raise ConfigError(f"tags has more than {MAX_TAGS} texts", option="tags")
    return tuple(
        dict.fromkeys(text(tag, what="each of tags", error=ConfigError, maximum=MAX_NAME) for tag in given)
    )


def _is_collection(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable) and not isinstance(value, bytes | bytearray | Mapping)


def _meta(meta: object) -> bytes | None:
    if meta is None:
        return None
    if not _is_mapping(meta):
        raise ConfigError(f"meta must be a dict; it is {shown(meta)}", option="meta", value=meta)
    try:
        document = encode_json(dict(meta), what="meta")
    except StateError as error:
        raise ConfigError(str(error), option="meta") from error
    if len(document) > MAX_META:
        raise ConfigError(f"meta has {len(document)} bytes of JSON, the limit is {MAX_META}", option="meta")
    return document if meta else None


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)
