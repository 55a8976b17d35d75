"""`Child`: a child to start, and the graph of children that come after each other. Pure.

A `Child` as the user writes it says what it comes after by objects and keys. `link_children` checks a whole outcome
once, when its `ScheduleChildren` is made, and returns children that say it by positions: `key`, `needs` and `any_end`
are all that the engine reads. Everything here is linear in children and edges, and nothing recurses: a chain may have
any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, Unpack

import attrs

from durable_actors._option_checks import shown
from durable_actors.errors import InvalidOutcome
from durable_actors.machine._checks import MAX_NAME, text
from durable_actors.machine._insert_options import InsertOptions, check_option_names
from durable_actors.machine._spec import MachineRef, is_machine_ref

When: TypeAlias = Literal["succeeded", "ended"]
"""When a child runs: all that it comes after are done, or have ended in any way."""

AUTOMATIC: Final = "#"
"""Begins the key of a child that has none of its own, before its position."""
_SHOWN: Final = 12
"""How many children of a cycle an error names."""

_set = object.__setattr__  # the class is frozen and has an explicit constructor


@attrs.frozen(init=False)
class Child:
    """A child to start, with insert options: `Child(ship_parcel, args=parcel, priority=-1)`.

    With `after` it waits until other children of the same outcome have ended: `Child(join, after=[left, "right"])`.
    """

    machine: MachineRef
    """A machine class, a job, or a registered name."""
    options: InsertOptions
    """Options as for `insert`. A child whose unique key is occupied is skipped, unless `on_duplicate="raise"` or others
    come after it."""
    key: str | None
    """Names the child among the children of its outcome: for `after`, `ctx.dependencies` and `ChildView.key`. One
    without a key that others come after is named "#0", "#1", … by its position."""
    after: tuple[Child | str, ...] = attrs.field(eq=False, repr=lambda after: repr(_names(after)))
    """The children that it comes after, or their keys; in `ScheduleChildren.children` their keys."""
    when: When
    """"succeeded": if one that it comes after fails or is cancelled, it is cancelled. "ended": it runs in any case."""
    needs: tuple[int, ...] = attrs.field(repr=False)
    """The positions of those that it comes after, in `ScheduleChildren.children`."""

    def __init__(
        self,
        machine: MachineRef,
        *,
        key: str | None = None,
        after: Child | str | Iterable[Child | str] = (),
        when: When = "succeeded",
        **options: Unpack[InsertOptions],
    ) -> None:
        if not is_machine_ref(machine):
            raise InvalidOutcome(
                f"a child must be a machine class, a job or a registered name, not {shown(machine)}; "
                "decorate functions with @da.job and pass machine classes, not objects of them"
            )
        check_option_names(options, error=InvalidOutcome)
        if options.get("on_duplicate") == "return":
            raise InvalidOutcome(
                'Child(on_duplicate="return"): the instance that occupies the key is not a child of this '
                'barrier; use "skip" (the default) or "raise"'
            )
        if when not in ("succeeded", "ended"):
            raise InvalidOutcome(f'Child(when=...) must be "succeeded" or "ended"; it is {shown(when)}')
        _set(self, "machine", machine)
        _set(self, "options", options)
        _set(self, "key", None if key is None else _checked_key(key))
        _set(self, "after", _after(after) if after != () else ())
        _set(self, "when", when)
        _set(self, "needs", ())

    @property
    def any_end(self) -> bool:
        """Whether it runs however those end that it comes after."""
        return self.when == "ended"


def link_children(children: tuple[Child, ...]) -> tuple[tuple[Child, ...], bool]:
    """Return the children with their `needs`, and whether there is a graph: some have a key, or come after others.

    Raises `InvalidOutcome` if two have the same key, one comes after something that is not among them, or they form
    a cycle.
    """
    for child in children:
        if child.after or child.key is not None:
            return _linked(children), True
    return children, False


def graph_cycle(needs: Sequence[Iterable[int]]) -> list[int] | None:
    """Return the positions of a cycle, each followed by one that comes after it, at last the first again; else None."""
    if all(need < index for index, each in enumerate(needs) for need in each):
        return None  # written in an order in which they can run, as most are
    feeds: list[list[int]] = [[] for _ in needs]
    left: list[int] = []
    for index, each in enumerate(needs):
        left.append(0)
        for need in each:
            feeds[need].append(index)
            left[index] += 1
    ready = [index for index, count in enumerate(left) if not count]
    while ready:
        for index in feeds[ready.pop()]:
            left[index] -= 1
            if not left[index]:
                ready.append(index)
    at = next((index for index, count in enumerate(left) if count), None)
    if at is None:
        return None
    # Each that is left comes after another one that is left: walk up until one is met again.
    met: dict[int, int] = {}
    path: list[int] = []
    while at not in met:
        met[at] = len(path)
        path.append(at)
        at = next(need for need in needs[at] if left[need])
    cycle = path[met[at] :][::-1]
    return [*cycle, cycle[0]]


def cycle_text(names: Sequence[str]) -> str:
    """Return a cycle for an error: "a -> b -> a"; a long one is shortened."""
    if len(names) > _SHOWN:
        names = [*names[: _SHOWN - 2], f"… ({len(names) - _SHOWN + 1} more)", names[-1]]
    return " -> ".join(names)


def _linked(children: tuple[Child, ...]) -> tuple[Child, ...]:
    by_key: dict[str, int] = {}
    by_object: dict[int, int] = {}
    repeated: set[int] = set()
    for index, child in enumerate(children):
        if child.key is not None:
            first = by_key.setdefault(child.key, index)
            if first != index:
                raise InvalidOutcome(
                    f"ScheduleChildren: children {first} and {index} have the same key {shown(child.key)}"
                )
        if by_object.setdefault(id(child), index) != index:
            repeated.add(id(child))
    needs: list[tuple[int, ...]] = []
    keys: list[str | None] = [child.key for child in children]
    for index, child in enumerate(children):
        found: dict[int, None] = {}
        for each in child.after:
            position = by_key.get(each) if isinstance(each, str) else by_object.get(id(each))
            if position is None or (not isinstance(each, str) and id(each) in repeated):
                raise InvalidOutcome(_unknown(index, child, each, by_key, twice=position is not None))
            found[position] = None
            if keys[position] is None:
                keys[position] = f"{AUTOMATIC}{position}"
        needs.append(tuple(found))
    cycle = graph_cycle(needs)
    if cycle is not None:
        names = [keys[index] or f"{AUTOMATIC}{index}" for index in cycle]
        raise InvalidOutcome(
            f"ScheduleChildren: these children come after each other, so none of them could run: {cycle_text(names)}"
        )
    return tuple(
        _with_needs(child, key, need, keys) for child, key, need in zip(children, keys, needs, strict=True)
    )


def _with_needs(child: Child, key: str | None, needs: tuple[int, ...], keys: Sequence[str | None]) -> Child:
    linked = Child.__new__(Child)
    _set(linked, "machine", child.machine)
    _set(linked, "options", child.options)
    _set(linked, "key", key)
    _set(linked, "after", tuple(keys[need] for need in needs))
    _set(linked, "when", child.when)
    _set(linked, "needs", needs)
    return linked


def _unknown(index: int, child: Child, after: Child | str, by_key: Mapping[str, int], *, twice: bool) -> str:
    subject = f"ScheduleChildren: child {index if child.key is None else shown(child.key)} comes after"
    if twice:
        return f"{subject} a child that is in the list twice: make one Child for each"
    if isinstance(after, str):
        known = ", ".join(list(by_key)[:10]) or "none has one"
        return f"{subject} the unknown key {shown(after)}; the keys are: {known}"
    return f"{subject} {after!r:.200}, which is not among the children"


def _checked_key(key: object) -> str:
    checked = text(key, what="Child(key=...)", error=InvalidOutcome, maximum=MAX_NAME)
    if checked.startswith(AUTOMATIC):
        raise InvalidOutcome(
            f"Child(key={shown(key)}): keys that begin with {AUTOMATIC} are for children without a key of their own"
        )
    return checked


def _after(after: Child | str | Iterable[Child | str]) -> tuple[Child | str, ...]:
    if isinstance(after, Child | str):
        return (after,)
    value: object = after
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping | type):
        raise InvalidOutcome(f"Child(after=...) {_REMEDY}, not {shown(after)}")
    given = tuple(after)
    for each in given:
        if not isinstance(each, Child | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidOutcome(f"Child(after=...) {_REMEDY}, not {shown(each)}")
    return given


_REMEDY: Final = "must name children by their Child objects or keys"


def _names(after: Sequence[Child | str]) -> list[str]:
    """For the repr: a child of a long chain must not print the whole chain."""
    return [
        each if isinstance(each, str) else each.key or f"<{type(each).__name__} without a key>"
        for each in after
    ]
