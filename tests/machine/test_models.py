"""pydantic models as state, arguments, results and payloads."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import durable_actors as da
import pydantic
import pytest
from durable_actors.machine import StateCodec, encode_json, plan_insert
from durable_actors.machine._codec import decode_json
from durable_actors.machine._fingerprint import shape_of
from durable_actors.testing import Bench

pytestmark = pytest.mark.usefixtures("registry")


class Line(pydantic.BaseModel):
    name: str
    cents: int = pydantic.Field(gt=0)


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    number: int = pydantic.Field(alias="orderNumber")
    lines: list[Line] = []
    at: datetime | None = None

    @pydantic.computed_field
    def total(self) -> int:
        return sum(line.cents for line in self.lines)


ORDER = Order(orderNumber=7, lines=[Line(name="tea", cents=300)], at=datetime(2026, 1, 2, tzinfo=UTC))


def codec(kind: Any = Order) -> StateCodec:
    return StateCodec(kind, machine="shop", version=1)


def test_a_model_is_stored_and_read_back():
    data = codec().encode(ORDER, step="start")
    assert data == b'{"orderNumber":7,"lines":[{"name":"tea","cents":300}],"at":"2026-01-02T00:00:00Z"}'
    assert codec().decode(data, step="start") == ORDER


def test_a_dict_that_fits_is_taken():
    assert codec().encode({"orderNumber": 7}, step="start") == b'{"orderNumber":7,"lines":[],"at":null}'


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"orderNumber": "7"}, r"at \$.orderNumber: Input should be a valid integer"),
        ({}, r"at \$.orderNumber: Field required"),
        (
            {"orderNumber": 7, "lines": [{"name": 1, "cents": -3}]},
            r"at \$.lines\[0\].name: .* valid string \(and 1 more\)",
        ),
        ({"orderNumber": 7, "odd": 1}, r"at \$.odd: Extra inputs are not permitted"),
        (Line(name="tea", cents=1), r"at \$: it must be Order, not Line"),
        (5, r"at \$: it must be Order, not int"),
        (None, r"at \$: it must be Order, not NoneType"),
    ],
)
def test_a_state_that_does_not_fit_is_a_clear_error(state: object, text: str):
    with pytest.raises(da.StateError, match=rf"^shop v1, step 'start': the state: {text}"):
        codec().encode(state, step="start")


def test_a_subclass_is_refused():
    class More(Line):
        weight: int = 0

    with pytest.raises(da.StateError, match="it must be Line, not"):
        codec(Line).encode(More(name="tea", cents=1), step="start")


def test_a_stored_state_that_no_longer_fits():
    with pytest.raises(da.StateError, match=r"the stored state does not fit Order: at \$.orderNumber: Field"):
        codec().decode(b'{"number": 7}', step="ship")


def test_what_would_not_read_back_is_refused():
    class Odd(pydantic.BaseModel):
        number: int = pydantic.Field(validation_alias="a", serialization_alias="b")

    with pytest.raises(da.StateError, match=r"would not read back as .*Odd: at \$.a: Field required"):
        codec(Odd).encode({"a": 1}, step="start")

    class Number(pydantic.BaseModel):
        value: float

    with pytest.raises(da.StateError):
        codec(Number).encode(Number(value=float("nan")), step="start")


def test_results_and_payloads():
    assert encode_json({"order": ORDER.lines[0]}, what="x") == b'{"order":{"name":"tea","cents":300}}'
    assert decode_json(b'{"name": "tea", "cents": 3}', what="x", type=Line) == Line(name="tea", cents=3)
    with pytest.raises(da.StateError, match=r"^x does not fit Line: at \$.cents: Input should be greater"):
        decode_json(b'{"name": "tea", "cents": -3}', what="x", type=Line)
    with pytest.raises(da.StateError, match="cannot be stored"):
        encode_json(object(), what="x")


def test_a_model_inside_another_type_is_an_error_at_definition():
    import attrs  # noqa: PLC0415

    @attrs.frozen
    class Cart:
        line: Line

    with pytest.raises(da.DefinitionError, match="a pydantic model must be the whole state"):
        codec(Cart)


def test_the_fingerprint_knows_its_fields():
    class Other(pydantic.BaseModel):
        name: str
        cents: str

    assert shape_of(Line) != shape_of(Other)
    assert shape_of(Line) == [["cents", True, "<class 'int'>"], ["name", True, "<class 'str'>"]]


def test_a_class_that_only_looks_like_one():
    class Duck:
        def __init__(self, n: int) -> None:
            self.n = n

        @classmethod
        def model_validate(cls, value: Any) -> Duck:
            return cls(int(value["n"]))

        def model_dump(self, **_: object) -> dict[str, int]:
            return {"n": self.n}

    data = codec(Duck).encode(Duck(3), step="start")
    assert codec(Duck).decode(data, step="start").n == 3


async def test_a_machine_and_a_job(durable: Bench):
    class Checkout(da.Machine[Order], name="pydantic checkout"):
        @da.step(initial=True)
        async def start(self, ctx: da.Context[Order]) -> da.Outcome:
            line = Line(name="cake", cents=400)
            return da.Next(self.end, ctx.state.model_copy(update={"lines": [*ctx.state.lines, line]}))

        @da.step
        async def end(self, ctx: da.Context[Order]) -> da.Outcome:
            assert isinstance(ctx.state, Order)
            return da.Done(ctx.state.lines[-1])

    @da.job(name="pydantic job")
    async def weigh(line: Line) -> Line:
        return Line(name=line.name.upper(), cents=line.cents)

    assert (
        plan_insert(weigh.__durable__, {"args": {"name": "tea", "cents": 3}}).state
        == b'{"name":"tea","cents":3}'
    )
    number = await durable.insert(Checkout, state=ORDER)
    job = await durable.insert(weigh, args=Line(name="tea", cents=3))
    await durable.drain()
    await durable.assert_done(number, {"name": "cake", "cents": 400})
    assert await da.result(job, type=Line) == Line(name="TEA", cents=3)
    with pytest.raises(da.StateError, match=r"at \$.cents"):
        await durable.insert(weigh, args={"name": "tea", "cents": 0})
