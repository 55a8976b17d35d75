"""Models that check and dump themselves, as pydantic's: recognised by their methods, the library is not imported.

A model is stored as `model_dump(mode="json")` says, by alias and without computed fields, and read by
`model_validate_json` (or `model_validate`). So validators, aliases and strict modes work as elsewhere, and a model is
what its own configuration says it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard, cast

import msgspec

_METHODS: Final = ("model_validate", "model_dump")
_decode = msgspec.json.Decoder().decode


def is_model(kind: object) -> TypeGuard[type[Any]]:
    """Return whether it is a class of models."""
    return isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in _METHODS)


def dump_model(value: object) -> Any:
    """Return a model as JSON values. For `enc_hook`: raises TypeError for anything else, as without a hook."""
    if not is_model(type(value)):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return cast("Any", value).model_dump(mode="json", by_alias=True, round_trip=True)


def load_model(kind: type[Any], data: bytes | str) -> Any:
    """Return a model from JSON. Raises what the model raises."""
    read = getattr(kind, "model_validate_json", None)
    return kind.model_validate(_decode(data)) if read is None else read(data)


def as_model(kind: type[Any], value: object) -> object:
    """Return the model that a dict describes; anything else as it is. Raises what the model raises."""
    return kind.model_validate(value) if isinstance(value, Mapping) else value


def model_shape(kind: type[Any]) -> list[Any]:
    """Return the fields of a model, for fingerprints: as stored, whether required, and their types."""
    fields: Mapping[str, Any] = getattr(kind, "model_fields", {})
    return sorted(
        [
            str(getattr(field, "alias", None) or name),
            _required(field),
            repr(getattr(field, "annotation", None)),
        ]
        for name, field in fields.items()
    )


def _required(field: Any) -> bool:
    ask = getattr(field, "is_required", None)
    return bool(ask()) if callable(ask) else False
