"""Every value comes back from a real server as it went in."""

import json
import math
import struct

import msgspec
import psycopg
import pytest
from durable_actors._postgres.driver import encode
from durable_actors.errors import StateError
from hypothesis import HealthCheck, given, settings, strategies as st

NASTY = st.sampled_from(
    [
        "",
        "NULL",
        "null",
        '"',
        "\\",
        '\\"',
        "{",
        "}",
        "{}",
        ",",
        "a,b",
        " ",
        " padded ",
        "\n",
        "\t",
        "'",
        "é",
        "𝄞",
    ]
)
# Postgres text holds everything but NUL and lone surrogates.
TEXT = NASTY | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
# jsonb keeps a number's decimal digits, not its type: a float beyond 2**53 would come back as an integer.
SCALAR = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-(2.0**53), 2.0**53) | TEXT
JSON = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
round_trip = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def server(pg_dsn):
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        yield conn.pgconn


def ask(server, query: bytes, *params: bytes | None):
    result = server.exec_params(query, list(params))
    assert not result.error_message, result.error_message
    return [result.get_value(row, 0) for row in range(result.ntuples)]


def nullable(values):
    return st.lists(st.none() | values, max_size=20)


@round_trip
@given(values=nullable(TEXT))
def test_text_array(server, values):
    got = ask(server, b"select u from unnest($1::text[]) u", encode.text_array(values))
    assert [v if v is None else v.decode() for v in got] == values


@round_trip
@given(values=nullable(st.integers(-(2**63), 2**63 - 1)))
def test_int_array(server, values):
    got = ask(server, b"select u from unnest($1::bigint[]) u", encode.int_array(values))
    assert [v if v is None else int(v) for v in got] == values


@round_trip
@given(values=nullable(st.floats()))
def test_float_array_keeps_every_bit(server, values):
    got = ask(server, b"select u from unnest($1::float8[]) u", encode.float_array(values))

    def bits(value):
        return None if value is None else "nan" if math.isnan(value) else struct.pack("d", value)

    assert [bits(v if v is None else float(v)) for v in got] == [bits(v) for v in values]


@round_trip
@given(values=nullable(st.booleans()))
def test_bool_array(server, values):
    got = ask(server, b"select u from unnest($1::bool[]) u", encode.bool_array(values))
    assert [v if v is None else v == b"t" for v in got] == values


@round_trip
@given(values=nullable(st.binary(max_size=40)))
def test_bytea_array(server, values):
    got = ask(server, b"select encode(u, 'hex') from unnest($1::bytea[]) u", encode.bytea_array(values))
    assert [v if v is None else bytes.fromhex(v.decode()) for v in got] == values


@round_trip
@given(values=nullable(JSON.map(lambda value: [value])))
def test_json_array(server, values):
    documents = [None if value is None else encode.json(value) for value in values]
    for kind in (b"jsonb", b"json", b"text"):
        query = b"select u from unnest($1::" + kind + b"[]) u"
        got = ask(server, query, encode.json_array(documents))
        assert [v if v is None else json.loads(v) for v in got] == values


@pytest.mark.parametrize("odd", [b'"\0"', b'"\1"', b"\1", b"\0,\0"])
def test_what_is_not_json_stays_one_element(odd):
    """Such a document is refused, and no other one moves to another row because of it."""
    literal = encode.json_array([b'{"a":"\\\\"}', odd, None, b"1"])
    quoted = b'"' + odd.replace(b'"', b'\\"') + b'"'
    assert literal == b'{"{\\"a\\":\\"\\\\\\\\\\"}",' + quoted + b',NULL,"1"}'
    assert encode.json_array([None]) == b"{NULL}"


@round_trip
@given(
    text=st.none() | TEXT, data=st.none() | st.binary(max_size=40), number=st.integers(-(2**63), 2**63 - 1)
)
def test_scalars(server, text, data, number):
    [got] = ask(server, b"select $1::text", encode.text(text))
    assert (got if got is None else got.decode()) == text
    [got] = ask(server, b"select encode($1::bytea, 'hex')", encode.bytea(data))
    assert (got if got is None else bytes.fromhex(got.decode())) == data
    assert ask(server, b"select $1::bigint", encode.number(number)) == [str(number).encode()]
    assert ask(server, b"select $1::float8 = $2::float8", encode.number(0.1), encode.number(1e-1)) == [b"t"]
    assert encode.number(None) is None


def test_empty_arrays(server):
    for kind in (
        encode.text_array,
        encode.int_array,
        encode.float_array,
        encode.bool_array,
        encode.bytea_array,
    ):
        assert kind([]) == b"{}"
    assert encode.json_array([]) == b"{}"


@pytest.mark.parametrize("bad", ["\0", "a\0b", "ends with\0"])
def test_a_nul_is_refused_here_because_libpq_would_cut_the_text(server, bad):
    with pytest.raises(StateError, match="NUL"):
        encode.text(bad)
    with pytest.raises(StateError, match="NUL"):
        encode.text_array(["fine", bad])
    assert ask(server, b"select $1::text", b"a\0b") == [b"a"]  # the reason


def test_a_lone_surrogate_is_refused():
    with pytest.raises(StateError, match="lone surrogate"):
        encode.text("\ud800")


def test_json_takes_what_msgspec_takes():
    class Point(msgspec.Struct):
        x: int

    assert encode.json({"p": Point(1)}) == b'{"p":{"x":1}}'
