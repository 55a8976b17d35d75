"""Checks of the parts of an outcome; each returns the part in its normal form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeGuard

from durable_actors._option_checks import shown
from durable_actors.errors import InvalidOutcome
from durable_actors.machine._checks import MAX_NAME, text, whole
from durable_actors.machine._context import Signal
from durable_actors.machine._step_ref import StepRef

MAX_ID = 2**63 - 1
MAX_TITLE = 2000
"""The longest title of a boundary, in characters."""


def step_name(step: Any, *, what: str) -> tuple[str, type[Any] | None]:
    """Return the step's name and, for a reference, the class that it belongs to."""
    if isinstance(step, StepRef):
        return step.name, step.owner
    if isinstance(step, str):
        return text(step, what=what, error=InvalidOutcome, maximum=MAX_NAME), None
    remedy = "decorate it with @da.step" if callable(step) else "give a step (self.ship) or its name"
    raise InvalidOutcome(f"{what} is not a step: {shown(step)}; {remedy}")


def title_of(title: object, *, what: str) -> str | None:
    """Return the title of a boundary."""
    return None if title is None else text(title, what=what, error=InvalidOutcome, maximum=MAX_TITLE)


def refuse_options(unknown: Mapping[str, object], *, what: str, renamed: Mapping[str, str]) -> NoReturn:
    """Raise `InvalidOutcome` for an unknown option; for a renamed one, the message gives the new name."""
    name, value = next(iter(unknown.items()))
    if name in renamed:
        raise InvalidOutcome(
            f"{what}({name}=...) is now called {renamed[name]}=: give {renamed[name]}={shown(value)}"
        )
    raise InvalidOutcome(f"{what} has no option {name!r}")


def signal_names(names: object, *, what: str) -> tuple[str, ...]:
    """Return the distinct names in the given order; a str is one name."""
    if isinstance(names, str):
        return (text(names, what=what, error=InvalidOutcome, maximum=MAX_NAME),)
    if not _is_collection(names):
        raise InvalidOutcome(f"{what} must be the name of a signal or a list of names, not {shown(names)}")
    checked = (text(name, what=what, error=InvalidOutcome, maximum=MAX_NAME) for name in names)
    unique = tuple(dict.fromkeys(checked))
    if not unique:
        raise InvalidOutcome(f"{what} is empty: the instance would wait forever")
    return unique


def signal_ids(consume: object, *, what: str) -> tuple[int, ...]:
    """Return the distinct ids in the given order."""
    if not _is_collection(consume):
        raise InvalidOutcome(f"{what} must be a list of signals or their ids, not {shown(consume)}")
    ids = (each.id if isinstance(each, Signal) else each for each in consume)
    checked = (whole(id_, what=what, error=InvalidOutcome, minimum=1, maximum=MAX_ID) for id_ in ids)
    return tuple(dict.fromkeys(checked))


def join_of(join: object, children: int) -> str | int:
    """Check when the barrier opens. A quorum that cannot be reached would park the parent forever."""
    what = "ScheduleChildren(join=...)"
    if isinstance(join, str) and join in {"all", "any_failed"}:
        return join
    if isinstance(join, str) or not isinstance(join, int):
        raise InvalidOutcome(f'{what} must be "all", "any_failed" or a number; it is {shown(join)}')
    quorum = whole(join, what=what, error=InvalidOutcome, minimum=1, maximum=MAX_ID)
    if children and quorum > children:
        raise InvalidOutcome(
            f"{what} waits for {quorum} of {children} children, so the barrier would never open"
        )
    return quorum


def children_of(children: object) -> Iterable[Any]:
    """Refuse values that are iterable but not a collection of children."""
    if not _is_collection(children):
        raise InvalidOutcome(
            f"ScheduleChildren(children) must be a list of children; it is {shown(children)}"
        )
    return children


def _is_collection(value: object) -> TypeGuard[Iterable[Any]]:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | type)
