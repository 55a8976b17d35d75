"""State, results and payloads as JSON bytes for jsonb columns, and back.

How each kind of value is stored (every line is tested):

===================================  =====================================================================
attrs, dataclass, TypedDict, Struct  by field; unknown fields are ignored, missing ones get their default
an object of another class           refused where the type names a class or a TypedDict (a subclass is refused, too);
                                     where the type is dict or Any, stored by field and read back as a dict
pydantic models, as a whole          by `model_dump(mode="json")`; read by `model_validate`, so with their validators
pydantic models inside dict or Any   the same, and read back as a dict
dict                                 accepted for every class whose required fields it has; keys become strings;
                                     jsonb does not keep the order of keys
datetime, date, time, timedelta,     as strings (bytes: base64, Enum: its value); read back as themselves if the
UUID, Decimal, bytes, Enum           type says so, as strings in a plain dict
tuple, set, frozenset                as arrays; read back as themselves if the type says so, otherwise as lists
int                                  any size up to 4,300 digits; numbers in jsonb are exact
float                                exact; from 1e16 on a plain dict reads back an int, since jsonb writes all digits
NaN, inf                             refused (the encoder would write null)
text with NUL or a lone surrogate    refused (jsonb cannot store it)
more than 32 MB of JSON              refused (store it elsewhere, and keep a reference here)
contains itself, or nested deeply    refused (the limit is Python's recursion limit, about 1,000 levels)
any other object, msgspec.Raw        refused
===================================  =====================================================================

A state is verified when it is *written*: it must decode to the machine's state type. Otherwise it would be
committed and no later step could read it, and the step that made it could no longer be identified.
Verifying costs one decode (0.2 µs for three fields).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError, StateError
from durable_actors.machine._diagnosis import complaint, find_problem
from durable_actors.machine._foreign_class import find_foreign, foreign_class, may_be_foreign, same_class
from durable_actors.machine._models import as_model, dump_model, is_model, load_model
from durable_actors.machine._reason import reason_text
from durable_actors.machine._state_type import TypeFacts, inspect_type, type_name

_encode = msgspec.json.Encoder(enc_hook=dump_model).encode
_encode_sorted = msgspec.json.Encoder(order="sorted", enc_hook=dump_model).encode
_decode_any = msgspec.json.Decoder().decode
_refuse_nan = json.JSONEncoder(allow_nan=False).encode
# An odd number of backslashes is the escape \u0000; an even number is the text backslash-u0000.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")

MAX_JSON = 32_000_000
"""Bytes: the limit of a whole group commit. A larger value would delay the commits of all other steps in its group:
one of 100 MB took Postgres more than 30 s on a busy machine, so it timed out and was sent again, endlessly. The server
closes the connection at 1 GB. Store large values elsewhere, and keep a reference in the state."""

_DECODER_PATH = re.compile(r" - at `(\$.*)`$", re.DOTALL)


class StateCodec:
    """Encodes and decodes the state of one machine. Error messages name the machine, version, step and path."""

    __slots__ = ("_decoder", "_facts", "_machine", "_subject", "_version", "type")

    def __init__(self, state_type: Any, *, machine: str, version: int) -> None:
        """Raise `DefinitionError` for a type that cannot be stored."""
        self.type: Any = state_type
        """The declared type."""
        self._machine = machine
        self._version = version
        self._subject = f"{machine} v{version}"
        self._decoder: msgspec.json.Decoder[Any] | _ModelDecoder | None = None
        self._facts: TypeFacts | None = None
        # A field may name a class that is defined later in the module; prepare() or the first use tries again.
        with suppress(NameError):
            self._build()

    def prepare(self) -> None:
        """Resolve the type now; raise `DefinitionError` if an annotation cannot be resolved."""
        if self._facts is None:
            try:
                self._build()
            except NameError as error:
                raise DefinitionError(
                    f"{self._subject}: an annotation of the state type {type_name(self.type)} cannot be "
                    f"resolved: {error}. Define or import that class at module level, at run time (not under "
                    "TYPE_CHECKING, not inside a function)"
                ) from error

    def encode(self, state: object, *, step: str) -> bytes:
        """Return the state as JSON; raise `StateError` if it cannot be stored, or not read back as its type."""
        facts, decoder = self._facts, self._decoder
        if facts is None or decoder is None:
            facts, decoder = self._ready()
        try:
            if facts.is_model and facts.record is not None:
                state = self._model(facts.record, state)
            data = _checked(state, may_hide_nan=facts.may_hide_nan)
        except _Refused as refused:
            raise self._named(
                refused.explained(state, f"{self._where(step)}: the state"), step
            ) from refused.cause
        if facts.is_free:
            if facts.is_object and data[:1] != b"{":
                text = f"{self._where(step)}: the state must be a dict, not {type(state).__name__}: {shown(state)}"
                raise self._named(StateError(text, path="$"), step)
            return data
        if (
            facts.record is not None
            and type(state) is not facts.record
            and (foreign := foreign_class(state, facts.record)) is not None
        ):
            raise self._named(StateError(f"{self._where(step)}: the state is {foreign}", path="$"), step)
        try:
            read = decoder.decode(data)
        except Exception as error:  # __post_init__ and validators of the user's class run here
            what = f"{self._where(step)}: the state would not read back as {type_name(self.type)}"
            raise self._named(_Refused(error).explained(state, what), step) from error
        if (
            facts.nested
            and may_be_foreign(state, read, data)
            and (problem := find_foreign(state, read)) is not None
        ):
            path, text = problem
            raise self._named(
                StateError(f"{self._where(step)}: the state: at {path}: {text}", path=path), step
            )
        return data

    def _model(self, kind: type[Any], state: object) -> object:
        """The model that is to be stored: a dict is one if it fits, an object of another class is not."""
        try:
            found = as_model(kind, state)
        except Exception as error:
            raise _Refused(error) from error
        if type(found) is not kind and not same_class(type(found), kind):
            raise _Refused(TypeError(f"it must be {kind.__qualname__}, not {type(found).__qualname__}"))
        return found

    def decode(self, data: bytes | str, *, step: str) -> Any:
        """Return the state from JSON; raise `StateError` if it does not match the type."""
        decoder = self._decoder or self._ready()[1]
        try:
            return decoder.decode(data)
        except Exception as error:  # __post_init__ and validators of the user's class run here
            what = f"{self._where(step)}: the stored state does not fit {type_name(self.type)}"
            raise self._named(_Refused(error).explained(None, what), step) from error

    def _where(self, step: str) -> str:
        return f"{self._subject}, step {shown(step)}"

    def _named(self, error: StateError, step: str) -> StateError:
        """Return the error with machine, version and step as attributes; its text has them already."""
        error.machine, error.version, error.step = self._machine, self._version, step
        return error

    def _ready(self) -> tuple[TypeFacts, msgspec.json.Decoder[Any] | _ModelDecoder]:
        if self._facts is None or self._decoder is None:
            self.prepare()
        assert self._facts is not None
        assert self._decoder is not None
        return self._facts, self._decoder

    def _build(self) -> None:
        facts = inspect_type(self.type, subject=self._subject)
        self._decoder = _ModelDecoder(self.type) if is_model(self.type) else msgspec.json.Decoder(self.type)
        self._facts = facts


class _ModelDecoder:
    """As a decoder of msgspec, for a model."""

    __slots__ = ("_kind",)

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind

    def decode(self, data: bytes | str) -> Any:
        return load_model(self._kind, data)


class StepwiseCodec(StateCodec):
    """The codec of a machine with a step that reads something else than the declared type: any JSON value."""

    __slots__ = ("_free", "_step")

    def __init__(self, state_type: Any, *, machine: str, version: int, free_step: str) -> None:
        """`free_step` is that step. Raise `DefinitionError` for a type that cannot be stored."""
        super().__init__(state_type, machine=machine, version=version)
        self._step = free_step
        self._free = StateCodec(Any, machine=machine, version=version)

    def encode(self, state: object, *, step: str) -> bytes:
        """As `StateCodec.encode`."""
        return self._free.encode(state, step=step) if step == self._step else super().encode(state, step=step)

    def decode(self, data: bytes | str, *, step: str) -> Any:
        """As `StateCodec.decode`."""
        return self._free.decode(data, step=step) if step == self._step else super().decode(data, step=step)


def canonical_json(value: object) -> bytes:
    """Return JSON for comparisons: equal values of one type give the same bytes, whatever the order of sets."""
    return _encode_sorted(value)


def encode_json(value: object, *, what: str | Callable[[], str]) -> bytes:
    """Return a result or payload as JSON; raise a `StateError` that begins with `what`."""
    try:
        return _checked(value, may_hide_nan=True)
    except _Refused as refused:
        raise refused.explained(value, what if isinstance(what, str) else what()) from refused.cause


def decode_json(data: bytes | str, *, what: str, type: Any = Any) -> Any:  # noqa: A002 - as in result(type=T)
    """Return a result or payload from JSON, as `type`; raise a `StateError` that begins with `what`."""
    try:
        if is_model(type):
            return load_model(type, data)
        return _decode_any(data) if type is Any else msgspec.json.decode(data, type=type)
    except Exception as error:
        if type is Any:  # the text is not JSON, so there is no path to report
            raise StateError(f"{what}: {_DECODER_PATH.sub('', _message_of(error))}") from error
        raise _Refused(error).explained(None, f"{what} does not fit {type_name(type)}") from error


def decode_or_text(data: bytes) -> Any:
    """Return a stored JSON value, or its text if Python cannot decode it, so that users and `handle` can read it.

    jsonb accepts numbers of 100,000 digits and deeper nesting than any decoder, and anyone can write rows by SQL.
    """
    try:
        return _decode_any(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "backslashreplace")


def _checked(value: object, *, may_hide_nan: bool) -> bytes:
    """Encode, and refuse what the encoder accepts but must not: NUL escapes, and NaN as null."""
    try:
        data = _encode(value)
        # The json module refuses NaN: 3.5 µs for a small value, needed only when the output contains a null.
        if may_hide_nan and value is not None and b"null" in data:
            _refuse_nan(msgspec.to_builtins(value, enc_hook=dump_model))
    except Exception as error:
        raise _Refused(error) from error
    if len(data) > MAX_JSON:
        raise _Refused(ValueError(f"it has {len(data)} bytes of JSON, the limit is {MAX_JSON}"))
    if b"\\u0000" in data and _NUL.search(data):
        raise _Refused(None)
    return data


class _Refused(Exception):  # noqa: N818 - never leaves this module
    """A value cannot be stored or read. `explained` turns it into a `StateError` where the context is known."""

    def __init__(self, cause: Exception | None) -> None:
        super().__init__()
        self.cause = cause

    def explained(self, value: object, what: str) -> StateError:
        """Return the error, with the path of the mistake in `value`, or the path that the decoder reported."""
        problem = None if value is None else find_problem(value)
        if problem is not None:
            path, text = problem
        elif isinstance(self.cause, RecursionError):
            path, text = "$", "it is nested too deeply"
        else:
            path, text = _place_of(self.cause)
        return StateError(f"{what}: at {path}: {text}", path=path)


def _place_of(cause: Exception | None) -> tuple[str, str]:
    """Return the path and the text of an error of an encoder or decoder, or of a model."""
    if cause is None:
        return "$", "it contains \\u0000"
    found = complaint(cause)
    if found is not None:
        return found
    text = _message_of(cause)
    place = _DECODER_PATH.search(text)
    return place.group(1) if place else "$", _DECODER_PATH.sub("", text)


def _message_of(cause: Exception) -> str:
    return str(cause) if isinstance(cause, ValueError | TypeError) else reason_text(cause)
