"""`@step(on_cancel=True)`: at most one, not the initial one; what a class inherits."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors._engine.committing.transition import failure, transition
from durable_actors._store.rows import Claim
from durable_actors.machine import spec_of

pytestmark = pytest.mark.usefixtures("registry")


class Base(da.Machine[dict], name="base"):
    @da.step
    async def start(self, ctx):
        return da.Done(1)

    @da.step(on_cancel=True)
    async def undo(self, ctx):
        return da.Done(2)


def on_cancel(machine: type) -> str | None:
    spec = spec_of(machine)
    assert spec is not None
    return spec.on_cancel


def test_it_is_inherited_and_replaced():
    class Same(Base, name="same"):
        pass

    class Other(Base, name="other"):
        @da.step(on_cancel=True)
        async def refund(self, ctx):
            return da.Done()

    class Without(Base, name="without"):
        @da.step
        async def undo(self, ctx):
            return da.Done()

    assert [on_cancel(each) for each in (Base, Same, Other, Without)] == ["undo", "undo", "refund", None]
    assert spec_of(Base).fingerprint != spec_of(Without).fingerprint  # type: ignore[union-attr]


def test_one_per_machine_and_not_the_first():
    with pytest.raises(da.DefinitionError, match=r"2 steps with on_cancel=True \(one, two\)"):

        class Two(da.Machine[dict]):
            @da.step
            async def start(self, ctx):
                return da.Done()

            @da.step(on_cancel=True)
            async def one(self, ctx):
                return da.Done()

            @da.step(on_cancel=True)
            async def two(self, ctx):
                return da.Done()

    with pytest.raises(da.DefinitionError, match="is the initial step"):

        class First(da.Machine[dict]):
            @da.step(on_cancel=True)
            async def start(self, ctx):
                return da.Done()

    with pytest.raises(da.DefinitionError, match=r"@step\(on_cancel=...\) must be True or False"):
        da.step(on_cancel=1)  # type: ignore[call-overload]


def test_every_end_of_a_compensation_is_cancelled():
    claim = Claim(1, "a", "q", 0, "base", 1, "undo", 2, 0, 3, b"{}", None, None, None, False, 0, 0, 0.0)
    claim.cancellation = da.Cancellation("why", "ada")
    spec = spec_of(Base)
    assert spec is not None
    done, stopped = transition(claim, spec, da.Done(7)), transition(claim, spec, da.Stop("no"))
    broken = failure(claim, ValueError("no"))
    assert [
        (each.status, each.last_error, each.result, each.attempt) for each in (done, stopped, broken)
    ] == [
        ("cancelled", "why", None, 2),
        ("cancelled", "no", None, 2),
        ("cancelled", "ValueError: no", None, 2),
    ]
    assert transition(claim, spec, da.Retry()).status == "runnable"
    assert transition(claim, spec, da.Await("x")).status == "awaiting_signal"
