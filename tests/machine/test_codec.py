"""State to JSON and back: what is stored, what comes back, and what is refused, with the place of the mistake."""

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from math import inf, nan
from typing import Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

import attrs
import durable_actors.machine as da
import msgspec
import pytest
from durable_actors.errors import DefinitionError, StateError
from hypothesis import given, settings, strategies as st


@attrs.frozen
class Item:
    price: float
    name: str = ""


@attrs.frozen
class Order:
    items: list[Item]
    note: str | None = None
    discount: float | None = None


@attrs.frozen
class GiftOrder(Order):
    card: str = ""


@attrs.frozen
class Invoice:
    """Has what an Order needs, and more."""

    items: list[Item]
    due: str


@attrs.frozen
class Priced:
    """Has what an Item and a Cart need, and more."""

    price: float
    seller: str
    total: float = 0.0


@attrs.frozen
class Sale(Item):
    cents: int = 0


def twin(cls):
    """Another class of the same name."""
    made = attrs.make_class(cls.__name__, {"items": attrs.field(), "more": attrs.field(default=1)})
    made.__module__ = "elsewhere"
    return made


@dataclasses.dataclass
class Basket:
    items: list[str]
    _seen: int = 0


class Cart(TypedDict):
    total: float
    code: NotRequired[str]


class Parcel(msgspec.Struct, rename="camel"):
    weight_kg: float
    inner: "Parcel | None" = None


class Crate(Parcel, rename="camel"):
    colour: str = ""


@attrs.frozen
class Carts:
    carts: list[Cart]


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.Enum):
    RED = "red"


@attrs.frozen
class Everything:
    at: dt.datetime
    day: dt.date
    length: dt.timedelta
    id: uuid.UUID
    amount: decimal.Decimal
    colour: Colour
    raw: bytes
    tags: set[str]
    both: tuple[int, str]
    point: Point
    by_id: dict[int, str]


def codec(type_: Any = dict) -> da.StateCodec:
    return da.StateCodec(type_, machine="shop:Checkout", version=3)


def there_and_back(type_, value):
    found = codec(type_)
    return found.decode(found.encode(value, step="s"), step="s")


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (dict, {"a": [1, 2.5, None, True, "ü", {"b": {}}]}),
        (dict[str, Any], {}),
        (Order, Order([Item(1.5, "a"), Item(2)], note="x")),
        (Basket, Basket(["a"], 5)),
        (Cart, {"total": 1.5}),
        (Cart, {"total": 1.5, "code": "X"}),
        (Parcel, Parcel(1.0, Parcel(2.0))),
        (Any, [1, "x"]),
        (int, 5),
        (list[Order], [Order([])]),
        (Order | None, None),
        (
            Everything,
            Everything(
                at=dt.datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=dt.UTC),
                day=dt.date(2026, 1, 2),
                length=dt.timedelta(days=1, seconds=1.5),
                id=uuid.UUID(int=5),
                amount=decimal.Decimal("1.10"),
                colour=Colour.RED,
                raw=b"\x00\xff",
                tags={"a", "b"},
                both=(1, "x"),
                point=Point(1, 2),
                by_id={1: "a", 2: "b"},
            ),
        ),
    ],
)
def test_there_and_back(type_, value):
    assert there_and_back(type_, value) == value


def test_a_plain_dict_gives_json_values_back():
    value = {
        "tuple": (1, 2),
        "date": dt.date(2026, 1, 2),
        "id": uuid.UUID(int=5),
        "amount": decimal.Decimal("1.10"),
        "colour": Colour.RED,
        "raw": b"\x00",
        1: "int key",
        "order": Order([]),
        "set": {1},
    }
    assert there_and_back(dict, value) == {
        "tuple": [1, 2],
        "date": "2026-01-02",
        "id": "00000000-0000-0000-0000-000000000005",
        "amount": "1.10",
        "colour": "red",
        "raw": "AA==",
        "1": "int key",
        "order": {"items": [], "note": None, "discount": None},
        "set": [1],
    }


@pytest.mark.parametrize("number", [2**63, -(2**64), 10**50, 10**4000, 1e300, 5e-324, -0.0, 0.1 + 0.2])
def test_numbers_are_exact(number):
    assert there_and_back(dict, {"n": number}) == {"n": number}


def test_a_dict_of_the_right_shape_is_taken_for_a_typed_state():
    found = codec(Order)
    data = found.encode({"items": [{"price": 1}]}, step="s")
    assert found.decode(data, step="s") == Order([Item(1.0)])


def test_dicts_may_hold_more_and_less_than_the_type():
    found = codec(Order)
    data = found.encode({"items": [{"price": 1, "gone": 2}, Item(1)], "gone": [Priced(1.0, "x")]}, step="s")
    assert found.decode(data, step="s") == Order([Item(1.0), Item(1.0)])


def test_a_reloaded_class_is_the_same_class():
    """After a reload the module's class is another object than the one that a running step was written with."""

    def define():
        @attrs.frozen
        class Reloaded:
            n: int

        return Reloaded

    assert codec(define()).encode(define()(1), step="s") == b'{"n":1}'
    assert codec(list[define()]).encode([define()(1)], step="s") == b'[{"n":1}]'


def test_where_any_class_fits_objects_are_stored_by_field():
    for type_ in (dict, dict[str, Any], Any):
        assert there_and_back(type_, Item(1.5, "x")) == {"price": 1.5, "name": "x"}
    assert there_and_back(list[Item | None], [Item(1.5), None]) == [Item(1.5), None]
    assert there_and_back(dict, {"a": Item(1.5)}) == {"a": {"price": 1.5, "name": ""}}


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults():
    assert codec(Order).decode(b'{"items":[],"gone":1}', step="s") == Order([])


def test_text_is_decoded_like_bytes():
    assert codec(Order).decode('{"items":[]}', step="s") == Order([])


CYCLE: list[Any] = []
CYCLE.append({"again": CYCLE})
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
SHARED = [1]


@pytest.mark.parametrize(
    ("state", "path", "text"),
    [
        ({"a": [1, {"b": nan}]}, "$.a[1].b", "nan is not JSON"),
        ({"a": inf}, "$.a", "inf is not JSON"),
        ({"a": -inf, "b": None}, "$.a", "-inf is not JSON"),
        ({"a": "x\0y"}, "$.a", "the text contains a NUL character"),
        ({"a": {"x\0": 1}}, "$.a", "the key 'x\\\\x00' contains a NUL"),
        ({"a": ["\ud800"]}, "$.a[0]", "the text contains a lone surrogate (position 0)"),
        ({"\udfff": 1}, "$", "contains a lone surrogate"),
        ({"a b": {1: {2}}, "c": object()}, "$.c", "an object cannot be stored"),
        ({"a b": [0, object()]}, "$['a b'][1]", "an object cannot be stored"),
        ({"a": {3: len}}, "$.a[3]", "a builtin_function_or_method cannot be stored"),
        ({"a": Order([Item(1, name=1j)])}, "$.a.items[0].name", "a complex cannot be stored"),
        ({"a": Parcel(object())}, "$.a.weight_kg", "an object cannot be stored"),
        ({"a": Basket([ValueError()])}, "$.a.items[0]", "a ValueError cannot be stored"),
        ({"a": {None: 1}}, "$.a", "the key None is a NoneType; JSON keys are strings"),
        ({"a": {(1, 2): 1}}, "$.a", "the key (1, 2) is a tuple"),
        ({"a": {True: 1}}, "$.a", "the key True is a bool"),
        ({"a": CYCLE}, "$.a[0].again", "list contains itself"),
        ({"a": DEEP}, "$", "it is nested too deeply"),
        ({"a": 10**5000}, "$.a", "an int cannot be stored"),
        ({"a": Order}, "$.a", "a type cannot be stored"),
        ({"a": {nan: None}}, "$.a", "the key nan is not JSON"),
        ({"a": msgspec.Raw(b"null")}, "$.a", "a Raw cannot be stored"),
        ({"a": msgspec.Raw(b'"\\u0000"')}, "$.a", "a Raw cannot be stored"),
        ({"a": SHARED, "b": SHARED, "c": nan}, "$.c", "nan is not JSON"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_place(state, path, text):
    with pytest.raises(StateError) as caught:
        codec().encode(state, step="ship")
    message = str(caught.value)
    assert message.startswith("shop:Checkout v3, step 'ship': the state")
    assert f": at {path}: " in message
    assert text.replace("\\\\", "\\") in message
    error = caught.value
    assert (error.machine, error.version, error.step, error.path) == ("shop:Checkout", 3, "ship", path)


@pytest.mark.parametrize(
    "text", ["\\u0000", "\\\\u0000", "a\\u0000b\\", "\\", "u0000", "\x01", "\\\\\\u0000", "null"]
)
def test_text_that_only_looks_like_nul_is_fine(text):
    assert there_and_back(dict, {"a": text, text: None}) == {"a": text, text: None}


@given(st.text(alphabet=["\\", "u", "0", "\0", "a", '"', "\n"]))
def test_nul_is_found_exactly_when_it_is_there(text):
    if "\0" in text:
        with pytest.raises(StateError, match="NUL"):
            codec().encode({"a": text}, step="s")
    else:
        assert there_and_back(dict, {"a": text}) == {"a": text}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_any_json_object_comes_back_or_is_refused(state):
    try:
        result = there_and_back(dict, state)
    except StateError as error:
        assert any(word in str(error) for word in ("NUL", "surrogate", "is not JSON"))  # noqa: PT017 - either way
    else:
        assert result == state


@pytest.mark.parametrize(
    ("type_", "state", "text"),
    [
        (dict, None, "must be a dict, not NoneType: None"),
        (dict, [1], "must be a dict, not list"),
        (Order, None, "would not read back as Order: at $: Expected `object`, got `null`"),
        (Order, Order([Item("1")]), "at $.items[0].price: Expected `float`, got `str`"),
        (Order, Order([Item(1.0), Item(nan)]), "at $.items[1].price: nan is not JSON"),
        (Order, Order([], discount=nan), "at $.discount: nan is not JSON"),
        (Order, {"items": [], "note": 5}, "at $.note: Expected `str | null`, got `int`"),
        (Order, {}, "Object missing required field `items`"),
        (Order, Basket(["a"]), "the state is a Basket, not an Order"),
        (Order, Invoice([], due="now"), "the state is an Invoice, not an Order"),
        (Order, twin(Order)([]), f"the state is an elsewhere.Order, not a {__name__}.Order"),
        (Order, GiftOrder([], card="x"), "is a GiftOrder and would be read back as an Order, without"),
        (Parcel, Basket(["a"]), "the state is a Basket, not a Parcel"),
        (Basket, Order([]), "the state is an Order, not a Basket"),
        (Cart, Priced(1.0, "x"), "the state is a Priced, not a dict"),
        (Order, Order([Priced(1.0, "x")]), "the state: at $.items[0]: this is a Priced, not an Item"),
        (Order, {"items": [Priced(1.0, "x")]}, "the state: at $.items[0]: this is a Priced, not an Item"),
        (
            Order,
            Order([Item(1), Sale(1, cents=5)]),
            "at $.items[1]: this is a Sale and would be read back as an Item",
        ),
        (Order | None, Invoice([], due="now"), "the state: at $: this is an Invoice, not an Order"),
        (list[Item], [Item(1.0), Priced(1.0, "x")], "the state: at $[1]: this is a Priced, not an Item"),
        (dict[str, Item], {"a b": Priced(1.0, "x")}, "at $['a b']: this is a Priced, not an Item"),
        (tuple[Item, ...], (Priced(1.0, "x"),), "at $[0]: this is a Priced, not an Item"),
        (set[Item], {Priced(1.0, "x")}, "at $[0]: this is a Priced, not an Item"),
        (Parcel, Parcel(1.0, Invoice([], due="x")), "at $.inner"),
        (
            Parcel,
            Parcel(1.0, Crate(1.0, None, "red")),
            "at $.inner: this is a Crate and would be read back as a Parcel",
        ),
        (Carts, Carts([Priced(1.0, "x")]), "at $.carts[0]: this is a Priced, not a dict"),
        (Cart, {"total": "1"}, "at $.total: Expected `float`, got `str`"),
        (Parcel, Parcel("x"), "at $.weightKg: Expected `float`, got `str`"),
        (int, True, "Expected `int`, got `bool`"),
    ],
)
def test_a_state_that_would_not_read_back_is_refused_when_written(type_, state, text):
    with pytest.raises(StateError) as caught:
        codec(type_).encode(state, step="ship")
    assert text in str(caught.value)
    assert "shop:Checkout v3, step 'ship'" in str(caught.value)
    assert (caught.value.machine, caught.value.version, caught.value.step) == ("shop:Checkout", 3, "ship")
    assert caught.value.path is not None
    assert caught.value.path == "$" or f"at {caught.value.path}: " in str(caught.value)


@pytest.mark.parametrize(
    ("type_", "data", "text"),
    [
        (Order, b'{"items":[{"price":1},{"price":"x"}]}', "at $.items[1].price: Expected `float`, got `str`"),
        (Order, b"{}", "at $: Object missing required field `items`"),
        (Order, b"[]", "at $: Expected `object`, got `array`"),
        (dict, b"3", "at $: Expected `object`, got `int`"),
        (dict, b"", "truncated"),
        (dict, b'{"a":', "truncated"),
        (dict, b'{"a":"\xff"}', "can't decode byte"),
        (dict, b'{"a":NaN}', "malformed"),
        (dict, b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_stored_state_that_does_not_fit(type_, data, text):
    with pytest.raises(StateError) as caught:
        codec(type_).decode(data, step="ship")
    assert str(caught.value).startswith("shop:Checkout v3, step 'ship': the stored state does not fit")
    assert text in str(caught.value)
    error = caught.value
    assert (error.machine, error.version, error.step) == ("shop:Checkout", 3, "ship")
    assert f": at {error.path}: " in str(error)


def test_validators_and_post_init_of_the_state_are_heard():
    @attrs.define
    class Positive:
        n: int = attrs.field(validator=attrs.validators.gt(0))

    with pytest.raises(StateError, match="'n' must be > 0: -1"):
        codec(Positive).decode(b'{"n":-1}', step="s")


def test_a_generic_state():
    T = TypeVar("T")

    @attrs.frozen
    class Box(Generic[T]):
        value: T

    assert there_and_back(Box[int], Box(5)) == Box(5)
    with pytest.raises(
        StateError, match=r"read back as .*Box\[int\]: at \$\.value: Expected `int`, got `str`"
    ):
        codec(Box[int]).encode(Box("x"), step="s")


def test_a_state_whose_constructor_raises_anything_is_a_state_error():
    @attrs.define
    class Picky:
        n: int = 0

        def __attrs_post_init__(self):
            if self.n < 0:
                raise KeyError("negative")

    with pytest.raises(StateError, match=r"does not fit .*Picky: at \$: KeyError: 'negative'"):
        codec(Picky).decode(b'{"n":-1}', step="s")
    with pytest.raises(StateError, match="would not read back"):
        codec(Picky).encode({"n": -1}, step="s")


def test_a_class_further_down_is_resolved_at_first_use():
    @attrs.define
    class Early:
        late: "Late | None" = None  # noqa: F821 - defined below

    found = codec(Early)
    with pytest.raises(
        DefinitionError,
        match=r"state type .*Early cannot be resolved: name 'Late' is not defined.*module level",
    ):
        found.prepare()
    with pytest.raises(DefinitionError, match="Late"):
        found.encode(Early(), step="s")
    globals()["Late"] = attrs.make_class("Late", {"n": attrs.field(type=int)})
    try:
        found.prepare()
        assert found.decode(b'{"late":{"n":1}}', step="s").late.n == 1
    finally:
        del globals()["Late"]


def test_results_and_payloads():
    assert msgspec.json.decode(da.encode_json([Item(1.0)], what="the result")) == [{"price": 1.0, "name": ""}]
    assert da.encode_json(None, what="the result") == b"null"
    assert da.decode_json(b'{"price":1}', what="the result", type=Item) == Item(1.0)
    assert da.decode_json(b"[1]", what="the result") == [1]
    with pytest.raises(StateError, match=r"the payload: at \$\[0\]: nan is not JSON"):
        da.encode_json([nan], what="the payload")
    with pytest.raises(StateError, match=r"the result does not fit Item: at \$\.price: Expected `float`"):
        da.decode_json(b'{"price":"x"}', what="the result", type=Item)
