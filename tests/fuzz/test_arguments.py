"""Whatever is passed to a call, an option or an outcome: it works, or the error is ours, short, and names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import durable_actors as da
import pytest
from durable_actors._client import _delivery_of
from durable_actors._dsn import resolve_dsn
from durable_actors._store.boundaries import decision_params
from durable_actors._store.commands import plan_command
from durable_actors._store.insert import plan_rows
from durable_actors._store.signal import plan_signal
from durable_actors.errors import DurableError
from durable_actors.machine import InsertOptions, reason_text
from hypothesis import given, strategies as st
from tests.fuzz.kit import ODD, Unprintable, any_text, define, fuzz, values

pytestmark = pytest.mark.usefixtures("registry")


def names_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def refuses_politely(
    call: Callable[[Any], object], value: Any, *, what: str, option: str | None = None
) -> None:
    """Take the value, or say no in a few words that name the option; anything else is a bug."""
    try:
        call(value)
    except DurableError as error:
        text = str(error)
        assert len(text) < 2000, (what, text[:200])
        text.encode()  # it can be printed
        if option is not None:
            assert option in text, (what, text)


CONFIG = names_of(da.Config.__init__)
QUEUES = names_of(da.Queue.__init__)
OPTIONS = list(InsertOptions.__annotations__)
OUTCOMES: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *((da.Next, {"step": "a"}, name) for name in ("step", "state", "partition_key", "consume")),
    *((da.Retry, {}, name) for name in ("state", "delay")),
    *((da.Await, {"names": "a"}, name) for name in ("names", "state", "then", "timeout", "consume")),
    *(
        (da.ScheduleChildren, {"then": "a", "children": []}, name)
        for name in ("then", "children", "state", "join", "timeout", "deadline", "rest")
    ),
    (da.Done, {}, "result"),
    (da.Stop, {}, "reason"),
    (da.Child, {}, "machine"),
]


@pytest.mark.parametrize("name", CONFIG)
def test_config(name):
    named = (
        None if name == "heartbeat_interval" else name
    )  # that one may blame lease_ttl, and the other way round
    for value in ODD:
        refuses_politely(
            lambda each: da.Config(**{"dsn": "host=x", name: each}), value, what=name, option=named
        )


def test_retention():
    for name in names_of(da.Retention.__init__):
        for value in ODD:
            refuses_politely(
                lambda each, name=name: da.Retention(**{name: each}), value, what=name, option=name
            )


def test_schedule():
    for name in names_of(da.Schedule.__init__):
        if name in {"machine", "args", "state"}:
            continue  # checked when it is planned
        for value in ODD:
            given = {"name": "s", "machine": "m", "every": 60, name: value}
            refuses_politely(lambda each, given=given: da.Schedule(**given), value, what=name)
            if name == "cron":
                refuses_politely(lambda each: da.Schedule("s", "m", cron=each), value, what=name)


@fuzz(200)
@given(text=any_text)
def test_any_text_as_a_cron_expression_or_zone(text):
    refuses_politely(lambda each: da.Schedule("s", "m", cron=each), text, what="cron")
    refuses_politely(lambda each: da.Schedule("s", "m", cron="0 3 * * *", tz=each), text, what="tz")


@fuzz(200)
@given(fields=st.lists(st.text("0123456789*/,-L#MONJAW ", max_size=6), min_size=4, max_size=7))
def test_almost_cron_expressions(fields):
    refuses_politely(lambda each: da.Schedule("s", "m", cron=each), " ".join(fields), what="cron")


def test_queue_and_dsn():
    for name in QUEUES:
        for value in ODD:
            refuses_politely(lambda each, name=name: da.Queue(**{name: each}), value, what=name, option=name)
    for value in ODD:
        refuses_politely(lambda each: da.Config(queues={each: 5}), value, what="queues") if _hashable(
            value
        ) else None
        refuses_politely(lambda each: da.Config(queues={"a": each}), value, what="queues")
        refuses_politely(lambda each: resolve_dsn(each, {}), value, what="dsn", option="dsn")


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("name", OPTIONS)
def test_insert_options(name):
    job = define()
    known = name if name not in {"args", "state", "step"} else None
    for value in ODD:
        refuses_politely(lambda each: plan_rows(job, [{name: each}]), value, what=name, option=known)


def test_rows_machines_and_signals():
    job = define()
    for value in ODD:
        refuses_politely(lambda each: plan_rows(job, each), value, what="rows")
        refuses_politely(lambda each: plan_rows(job, [each]), value, what="row")
        refuses_politely(lambda each: plan_rows(each, [{}]), value, what="machine")
        refuses_politely(_delivery_of, value, what="signals")
        refuses_politely(
            lambda each: plan_signal(each, "n", None, None), value, what="target", option="target"
        )
        refuses_politely(lambda each: plan_signal(1, each, None, None), value, what="name", option="name")
        refuses_politely(
            lambda each: decision_params("approve", each, None), value, what="comment", option="comment"
        )
        refuses_politely(
            lambda each: decision_params("reject", None, each), value, what="data", option="data"
        )
        refuses_politely(
            lambda each: plan_signal(1, "n", each, None), value, what="payload", option="payload"
        )
        refuses_politely(
            lambda each: plan_signal(1, "n", None, each), value, what="dedup", option="dedup_key"
        )


@pytest.mark.parametrize("name", names_of(plan_command))
def test_commands(name):
    for value in ODD:
        refuses_politely(lambda each: plan_command(**{name: each}), value, what=name, option=name)
        refuses_politely(lambda each: plan_command(meta={"a": [each]}), value, what="meta", option="meta")


@pytest.mark.parametrize(
    ("outcome", "base", "name"), OUTCOMES, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_outcomes(outcome, base, name):
    for value in ODD:
        refuses_politely(lambda each: outcome(**{**base, name: each}), value, what=name)


def test_definitions():
    def job(name: str, value: Any) -> None:
        @da.job(**{name: value})
        async def made(args: Any) -> None: ...

    def machine(name: str, value: Any) -> None:
        class Made(da.Machine, **{name: value}):
            @da.step
            async def start(self, ctx: Any) -> Any: ...

    for value in ODD:
        for name in (
            "queue",
            "max_attempts",
            "backoff",
            "name",
            "version",
            "timeout",
            "keep",
            "cron",
            "every",
            "tz",
            "overlap",
        ):
            refuses_politely(lambda each, name=name: job(name, each), value, what=name)
        for name in ("name", "version", "queue", "initial", "state", "run_ahead", "max_attempts", "keep"):
            if not (
                name == "state" and isinstance(value, Unprintable | str)
            ):  # msgspec prints what is no type
                refuses_politely(lambda each, name=name: machine(name, each), value, what=name)


@fuzz(100)
@given(value=values, other=any_text, which=st.integers(0, 7))
def test_values_that_nobody_thought_of(value, other, which):
    job, value = define(), value.it
    calls: list[Callable[[Any], object]] = [
        lambda each: plan_rows(job, [{OPTIONS[len(other) % len(OPTIONS)]: each}]),
        lambda each: plan_rows(job, [{"args": {other: each}}]),
        lambda each: plan_signal(each, other, None, None),
        lambda each: plan_signal(1, "n", {"a": [each, other]}, other),
        lambda each: da.Config(**{"dsn": "host=x", CONFIG[len(other) % len(CONFIG)]: each}),
        lambda each: da.Await([other, each], timeout=each if isinstance(each, float) else None),
        lambda each: da.Next(other, each, partition_key=other),
        lambda each: plan_rows(job, [{other: each}]),
    ]
    refuses_politely(calls[which], value, what=str(which))
    text = reason_text(value)
    assert text
    text.encode()
    assert "\0" not in text


@fuzz(60)
@given(dsn=any_text)
def test_any_text_as_a_dsn(dsn):
    refuses_politely(lambda each: da.Config(dsn=each), dsn, what="dsn")
    refuses_politely(lambda each: da.Config(dsn="host=x", session_dsn=each), dsn, what="session_dsn")
