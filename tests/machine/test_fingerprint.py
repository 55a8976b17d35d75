"""The fingerprint of a definition: its structure counts, its code does not."""

from __future__ import annotations

import enum
from typing import Any, Literal

import attrs
import durable_actors.machine as da
import msgspec
import pytest
from durable_actors.machine._fingerprint import shape_of


class Size(enum.Enum):
    SMALL = "s"


@attrs.frozen
class Tree:
    """Contains itself."""

    size: Size
    left: Tree | None = None
    name: Literal["a", "b"] = "a"
    rest: dict[str, list[float]] = attrs.Factory(dict)


@attrs.frozen
class SameTree:
    """Another class of the same form."""

    size: Size
    left: SameTree | None = None
    name: Literal["a", "b"] = "b"
    rest: dict[str, list[float]] = attrs.Factory(dict)


class Bigger(enum.Enum):
    SMALL = "s"
    BIG = "b"


@attrs.frozen
class OtherTree:
    size: Bigger
    left: OtherTree | None = None
    name: Literal["a", "b"] = "a"
    rest: dict[str, list[float]] = attrs.Factory(dict)


def machine(state: Any = Tree, *, name: str = "m", version: int = 1, timeout: float | None = None) -> Any:
    class M(da.Machine, name=name, version=version, state=state):
        @da.step(timeout=timeout)
        async def start(self, ctx: Any) -> Any:
            return da.Done(1)

        @da.step
        async def end(self, ctx: Any) -> Any:
            return da.Done(2)

    return M


def other_code() -> Any:
    class M(da.Machine, name="m", state=SameTree, queue="elsewhere", journal="full"):
        """Steps in another order, which do something else."""

        @da.step
        def end(self, ctx: Any) -> Any:
            return da.Stop("no")

        @da.step
        async def start(self, ctx: Any) -> Any:
            return da.Next(self.end)

    return M


def another_step() -> Any:
    class M(da.Machine, name="m", state=Tree):
        @da.step
        async def start(self, ctx: Any) -> Any: ...

        @da.step
        async def ended(self, ctx: Any) -> Any: ...

    return M


def another_start() -> Any:
    class M(da.Machine, name="m", state=Tree, initial="end"):
        @da.step
        async def start(self, ctx: Any) -> Any: ...

        @da.step
        async def end(self, ctx: Any) -> Any: ...

    return M


def made(make: Any) -> str:
    with da.isolated_registry():
        found = make().__durable__.fingerprint
    assert len(bytes.fromhex(found)) == 8
    return found


def test_the_same_structure_with_other_code():
    assert made(machine) == made(machine) == made(other_code)


@pytest.mark.parametrize(
    "other",
    [
        another_step,
        another_start,
        lambda: machine(OtherTree),
        lambda: machine(dict),
        lambda: machine(name="n"),
        lambda: machine(version=2),
        lambda: machine(timeout=5),
    ],
)
def test_another_structure(other):
    assert made(other) != made(machine)


def test_it_is_the_same_tomorrow():
    """Stored in rows: it must not change with a release, or every deploy would look like another definition."""
    with da.isolated_registry():

        class M(da.Machine, name="m", state=dict):
            @da.step(timeout=1.5)
            async def start(self, ctx: Any) -> Any: ...

    assert M.__durable__.fingerprint == "a09318cd0ab5f945"


def test_a_shape_has_fields_and_no_names_of_classes():
    class Point(msgspec.Struct, tag="p"):
        x: int
        y: float = 0

    assert shape_of(Tree) == shape_of(SameTree)
    [kind, parts] = shape_of(Point)
    assert kind == "StructType"
    assert parts["tag"] == "p"
    assert [(name, required) for name, required, _ in parts["fields"]] == [("x", True), ("y", False)]


def test_a_job_has_one():
    with da.isolated_registry():

        @da.job(name="j")
        async def j(args: dict[str, int]) -> None: ...

    assert len(j.__durable__.fingerprint) == 16
