"""Settings: the contract's defaults, and an error that names option and value for whatever cannot work."""

from __future__ import annotations

import math
import socket
from datetime import timedelta

import attrs
import durable_actors as da
import pytest
from durable_actors._dsn import EMBEDDED, resolve_dsn
from durable_actors._option_checks import shown
from durable_actors._option_fields import options_of
from hypothesis import given, strategies as st

DSN = {"dsn": "dbname=x"}

DEFAULTS = {
    "session_dsn": None,
    "schema": "durable",
    "migrate": True,
    "name": "default",
    "node": socket.gethostname(),
    "machines": (),
    "modules": (),
    "queues": None,
    "lease_ttl": 60,
    "heartbeat_interval": 20,
    "poll_interval": 1,
    "max_poll_interval": 5,
    "long_poll": 0.1,
    "reap_interval": 30,
    "dead_after": 10,
    "prefetch": 0,
    "min_demand": 1,
    "drain_timeout": 5,
    "drain_on_cancel": True,
    "start_timeout": 30,
    "pool_size": 6,
    "thread_limit": 40,
    "max_crashes": None,
    "late_commit": "accept",
    "journal": "auto",
    "retention": da.Retention(
        done=7 * 86_400, cancelled=7 * 86_400, failed=30 * 86_400, history=10_000, interval=60
    ),
    "limits": {},
    "schedules": (),
    "observers": (),
    "dashboard": None,
    "notifier": None,
}


def test_the_contracts_defaults():
    config = da.Config(**DSN)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert {field.name for field in attrs.fields(da.Config)} == {*DEFAULTS, "dsn"}


@pytest.mark.parametrize("cls", [da.Config, da.Queue, da.Retention])
def test_a_field_tells_all_about_its_option(cls):
    for name, option in options_of(cls).items():
        field = attrs.fields_dict(cls)[name]
        assert option.meaning.endswith("."), name
        assert option.values, name
        assert option.default is not None or "None" not in option.default_words, name
        kind = {"float": "duration", "int": "number", "bool": "flag"}.get(field.type.split(" ")[0], "text")
        assert option.kind == kind, name


@pytest.mark.parametrize("cls", [da.Config, da.Queue, da.Retention])
def test_the_checks_accept_the_defaults(cls):
    for name, option in options_of(cls).items():
        assert cls(**{**(DSN if cls is da.Config else {}), name: option.default})


def test_flags_differ():
    flags = [option.flag for option in options_of(da.Config).values() if option.flag]
    assert len({*flags}) == len(flags)


def test_numbers_have_one_type():
    config = da.Config(lease_ttl=9, long_poll=None, drain_timeout=0, **DSN)
    for name, option in options_of(da.Config).items():
        assert option.kind != "duration" or type(getattr(config, name)) is float, name


def test_equality_and_copies():
    config = da.Config(lease_ttl=9, queues={"a": 1}, **DSN)
    assert config == da.Config(lease_ttl=timedelta(seconds=9), queues={"a": da.Queue(1)}, **DSN)
    assert config != da.Config(lease_ttl=9, queues={"a": 2}, **DSN)
    assert attrs.evolve(config, pool_size=9).pool_size == 9


def test_passwords_are_not_shown():
    config = da.Config(dsn="postgresql://me:secret@h/db", session_dsn="host=h password=secret")
    assert "secret" not in repr(config)
    assert "'dbname=x'" in repr(da.Config(**DSN))


def test_only_concurrency_goes_by_position():
    assert da.Queue(7) == da.Queue(concurrency=7)
    with pytest.raises(TypeError):
        da.Queue(7, 8)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        da.Config("dbname=x")  # type: ignore[call-arg]


OWN = {"Limit": {"rate": 1}, "Schedule": {"name": "x", "machine": "x", "every": 60}}
"""What these need in any case."""


@pytest.mark.parametrize(
    ("cls", "option", "hint"),
    [
        (da.Config, "leas_ttl", "did you mean lease_ttl?"),
        (da.Config, "nope", "did you mean node?"),
        (da.Config, "colour", "the options are dsn, session_dsn, schema, "),
        (da.Queue, "min_deman", "did you mean min_demand?"),
        (da.Retention, "don", "did you mean done?"),
        (da.Dashboard, "prt", "did you mean port?"),
        (da.Limit, "bust", "did you mean burst?"),
        (da.Schedule, "chron", "did you mean cron?"),
    ],
)
def test_an_unknown_option_is_named(cls, option, hint):
    with pytest.raises(da.ConfigError) as caught:
        cls(**OWN.get(cls.__name__, {}), **{option: 5})
    assert str(caught.value).startswith(f"{option}=5: there is no such option; {hint}")
    assert (caught.value.option, caught.value.value) == (option, 5)


@pytest.mark.parametrize(
    ("cls", "option"), [(da.Config, "sesion_dsn"), (da.Config, "password"), (da.Dashboard, "tokn")]
)
def test_a_misspelt_option_does_not_show_a_password(cls, option):
    with pytest.raises(da.ConfigError, match=f"{option}=[.]{{3}}: there is no such option") as caught:
        cls(**{option: "postgresql://me:secret@h/db"})
    assert "me:secret" not in str(caught.value)


def test_a_copy_refuses_unknown_options():
    with pytest.raises(da.ConfigError, match="did you mean pool_size"):
        attrs.evolve(da.Config(**DSN), pol_size=9)  # type: ignore[call-arg]


def test_it_is_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        da.Config(**DSN).name = "x"  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        da.Queue().concurrency = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        da.Config(queues={"a": 1}, **DSN).queues["b"] = da.Queue()  # type: ignore[index]


def test_what_depends_on_another_option():
    assert da.Config(lease_ttl=9, **DSN).heartbeat_interval == 3
    assert da.Config(lease_ttl=9, heartbeat_interval=3, **DSN).heartbeat_interval == 3
    assert da.Config(poll_interval=7, **DSN).max_poll_interval == 7
    assert da.Config(poll_interval=0.1, **DSN).max_poll_interval == 5
    assert da.Config(heartbeat_interval=None, max_poll_interval=None, node=None, **DSN) == da.Config(**DSN)


def test_durations_are_seconds_or_timedeltas():
    config = da.Config(
        lease_ttl=timedelta(days=60),
        drain_timeout=timedelta(0),
        poll_interval=timedelta(milliseconds=5),
        **DSN,
    )
    assert (config.lease_ttl, config.drain_timeout, config.poll_interval) == (5184000.0, 0.0, 0.005)
    assert da.Queue(1, poll_interval=timedelta(seconds=2)).poll_interval == 2.0


def test_queues():
    config = da.Config(
        queues={"a": 5, "b": da.Queue(2, prefetch=3, min_demand=2, max_poll_interval=9)}, **DSN
    )
    assert config.queues is not None
    assert config.queues["a"] == da.Queue(5)
    assert (config.queues["b"].prefetch, config.queues["b"].poll_interval) == (3, None)
    assert da.Config(queues={}, **DSN).queues == {}
    assert da.Queue().concurrency == 10


def test_names_of_modules():
    assert da.Config(modules="shop.machines", **DSN).modules == ("shop.machines",)
    assert da.Config(modules=["a", "b"], **DSN).modules == ("a", "b")


BAD = [
    ("dsn", 5),
    ("session_dsn", 5),
    ("session_dsn", "embedded"),
    *(("schema", value) for value in ("", "Durable", "a-b", "1a", "x" * 64, "pg_x", 'a"; drop', None, 5)),
    ("migrate", "yes"),
    *(("name", value) for value in ("", None, "a\nb", "x" * 201)),
    ("node", ""),
    ("machines", 5),
    ("modules", 5),
    ("modules", [5]),
    ("queues", ["a"]),
    ("queues", {"": 1}),
    ("queues", {5: 1}),
    *(
        (name, value)
        for name in (
            "lease_ttl",
            "heartbeat_interval",
            "poll_interval",
            "max_poll_interval",
            "reap_interval",
            "dead_after",
        )
        for value in (0, -1, math.nan, math.inf, "5", True, timedelta(-1))
    ),
    ("drain_timeout", -1),
    ("drain_on_cancel", 1),
    *(
        (name, value)
        for name in ("prefetch", "min_demand", "pool_size", "thread_limit")
        for value in (-1, 1.5, "5", True)
    ),
    ("min_demand", 0),
    ("pool_size", 2),
    ("thread_limit", 0),
    ("max_crashes", 0),
    ("late_commit", "maybe"),
    ("journal", "everything"),
    ("journal", None),
    *(("schedules", value) for value in (5, "nightly", [5], [da.Schedule("a", "m", every=60)] * 2)),
    *(("retention", value) for value in (5, "7d", {}, True)),
    ("observers", 5),
    ("observers", ["print"]),
    ("notifier", "print"),
    ("notifier", 5),
]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_a_bad_value_is_named(option, value):
    with pytest.raises(da.ConfigError, match=option) as caught:
        da.Config(**{**DSN, option: value})
    assert caught.value.option == option
    assert shown(value) in str(caught.value) or option in {
        "queues",
        "modules",
        "observers",
        "max_poll_interval",
    }


@pytest.mark.parametrize("option", ["done", "cancelled", "failed", "interval"])
@pytest.mark.parametrize("value", [0, 0.5, -1, math.nan, math.inf, "5", True, timedelta(milliseconds=1)])
def test_a_bad_age_is_named(option, value):
    with pytest.raises(da.ConfigError, match=option) as caught:
        da.Retention(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize("value", [0, 999, 1.5, "5000", True, 10**10])
def test_a_bad_length_of_a_history_is_named(value):
    with pytest.raises(da.ConfigError, match="history"):
        da.Retention(history=value)
    assert da.Retention(history=None).history is None


def test_ages_are_seconds_or_none():
    kept = da.Retention(done=timedelta(days=60), cancelled=1, failed=None)
    assert (kept.done, kept.cancelled, kept.failed) == (5_184_000.0, 1.0, None)
    with pytest.raises(da.ConfigError, match="interval"):
        da.Retention(interval=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1.5, "5", None, True])
def test_a_bad_concurrency_is_named(value):
    for make in (lambda: da.Queue(value), lambda: da.Config(queues={"a": value}, **DSN)):
        with pytest.raises(da.ConfigError, match=f"concurrency={value!r}"):
            make()


@pytest.mark.parametrize(
    ("option", "value"),
    [("prefetch", -1), ("min_demand", 0), ("poll_interval", 0), ("max_poll_interval", "x")],
)
def test_a_bad_queue_option_is_named(option, value):
    with pytest.raises(da.ConfigError, match=f"{option}={value!r}"):
        da.Queue(1, **{option: value})


@given(st.floats(0.01, 1000), st.floats(0.001, 1000))
def test_three_heartbeats_fit_into_a_lease(lease, beat):
    try:
        config = da.Config(lease_ttl=lease, heartbeat_interval=beat, **DSN)
    except da.ConfigError:
        assert beat * 3 > lease
    else:
        assert config.heartbeat_interval * 3 <= config.lease_ttl * 1.00001


@pytest.mark.parametrize(
    ("given", "kept"), [(None, 0.0), (0, 0.0), (0.02, 0.02), (1, 1.0), (timedelta(0), 0.0)]
)
def test_long_poll_may_be_off(given, kept):
    assert da.Config(long_poll=given, **DSN).long_poll == kept
    assert da.Queue(1, long_poll=given).long_poll == (None if given is None else kept)


@pytest.mark.parametrize("value", [-1, 0.0001, 1.5, True, "x", float("nan"), timedelta(minutes=1)])
def test_a_long_poll_that_cannot_work(value):
    with pytest.raises(da.ConfigError, match="long_poll=") as caught:
        da.Config(long_poll=value, **DSN)
    assert caught.value.option == "long_poll"
    with pytest.raises(da.ConfigError, match="long_poll="):
        da.Queue(1, long_poll=value)


def test_polls_in_order():
    with pytest.raises(da.ConfigError, match="max_poll_interval=1 is less than poll_interval=2"):
        da.Config(poll_interval=2, max_poll_interval=1, **DSN)


@pytest.mark.parametrize(
    ("dsn", "environ", "found"),
    [
        ("dbname=x", {"DURABLE_DSN": "dbname=y"}, "dbname=x"),
        (None, {"DURABLE_DSN": "dbname=y", "PGHOST": "h"}, "dbname=y"),
        (None, {"PGHOST": "h"}, ""),
        (None, {"PGSERVICE": "s"}, ""),
        (None, {}, EMBEDDED),
        (None, {"DURABLE_DSN": ""}, EMBEDDED),
        ("embedded", {"DURABLE_DSN": "dbname=y"}, EMBEDDED),
        ("dbname=x", {"DURABLE_EMBEDDED": "0"}, "dbname=x"),
    ],
)
def test_which_postgres(dsn, environ, found):
    assert resolve_dsn(dsn, environ) == found


@pytest.mark.parametrize("dsn", [None, "embedded"])
@pytest.mark.parametrize("word", ["0", "no", "False", "OFF"])
def test_the_embedded_one_can_be_forbidden(dsn, word):
    with pytest.raises(da.ConfigError, match="DURABLE_EMBEDDED"):
        resolve_dsn(dsn, {"DURABLE_EMBEDDED": word})
