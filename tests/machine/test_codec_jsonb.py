"""What the codec accepts, jsonb stores: a state that the database refuses would abort a whole group commit."""

import durable_actors.machine as da
import psycopg
import pytest
from durable_actors.errors import StateError
from hypothesis import given, settings, strategies as st

CODEC = da.StateCodec(dict, machine="m", version=1)


@pytest.fixture(scope="module")
def connection(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        yield connection


def through_jsonb(connection, data):
    return connection.execute("select convert_from(%s, 'utf8')::jsonb::text", [data]).fetchone()[0]


@pytest.mark.parametrize(
    "state",
    [
        {"n": 10**4000, "m": -(10**4000), "i": 2**63},
        {"f": 1e308, "g": 5e-324, "h": 0.1, "z": -0.0, "e": 1.7976931348623157e308, "s": 1e16, "t": 1e22},
        {"\\u0000": "\\u0000 \\\\u0000 \\", "": "", "\x01\x1f\x7f": "\x01\u2028\uffff\U0010ffff"},
        {"deep": [[[[[[[[[[{}]]]]]]]]]]},
    ],
)
def test_odd_values_come_back(connection, state):
    text = through_jsonb(connection, CODEC.encode(state, step="s"))
    assert same(CODEC.decode(text, step="s"), state)


@pytest.mark.parametrize("number", [1e308, 1.7976931348623157e308, 5e-324, 1e16, 1e23, 0.1])
def test_a_typed_float_comes_back_as_the_same_float(connection, number):
    typed = da.StateCodec(list[float], machine="m", version=1)
    (back,) = typed.decode(through_jsonb(connection, typed.encode([number], step="s")), step="s")
    assert (type(back), back) == (float, number)


@pytest.mark.parametrize("value", ["\0", "\ud800"])
def test_what_the_codec_refuses_the_database_would_refuse(connection, value):
    with pytest.raises(StateError):
        CODEC.encode({"a": value}, step="s")
    raw = b'{"a":"\\u0000"}' if value == "\0" else b'{"a":"\\ud800"}'
    with pytest.raises(psycopg.errors.DataError):
        through_jsonb(connection, raw)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None))
STATES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(STATES)
def test_every_accepted_state_is_stored_and_comes_back(connection, state):
    try:
        data = CODEC.encode(state, step="s")
    except StateError:
        return
    back = CODEC.decode(through_jsonb(connection, data), step="s")
    assert same(back, state)


def same(back, value):
    """Equal, except that jsonb writes large floats as digits: 1e23 comes back as the int 10 ** 23."""
    if isinstance(value, float):
        return float(back) == value
    if isinstance(value, dict):
        return back.keys() == value.keys() and all(same(back[key], value[key]) for key in value)
    if isinstance(value, list):
        return len(back) == len(value) and all(map(same, back, value))
    return back == value and type(back) is type(value)
