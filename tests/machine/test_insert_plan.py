"""Insert options become one checked row."""

import datetime as dt
from itertools import chain, combinations, repeat
from types import MappingProxyType

import attrs
import durable_actors.machine as da
import pytest
from durable_actors.errors import ConfigError, StateError
from durable_actors.machine._insert_plan import LIVE, STATUSES, closed_scope
from durable_actors.machine._labels import Labels

NOON = dt.datetime(2026, 11, 16, 12, tzinfo=dt.UTC)


@attrs.frozen
class Order:
    order: int = 0


def checkout():
    class Checkout(da.Machine[Order], name="shop:Checkout", queue="fast", version=2):
        @da.step
        async def start(self, ctx): ...

        @da.step
        async def ship(self, ctx): ...

    return Checkout


def plan(**options):
    return da.plan_insert(checkout().__durable__, options)


def test_the_defaults():
    assert plan() == da.InsertPlan(
        machine="shop:Checkout",
        version=2,
        step="start",
        queue="fast",
        state=b"{}",
        priority=0,
        partition_key=None,
        unique_key=None,
        unique_scope=(),
        eligible_at=None,
        delay=0.0,
        on_duplicate="raise",
        labels=None,
        journal=da.OUTCOMES,
        fingerprint=checkout().__durable__.fingerprint,
    )


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"state": Order(5)}, "state", b'{"order":5}'),
        ({"args": Order(5)}, "state", b'{"order":5}'),
        ({"state": {"order": 5}}, "state", b'{"order":5}'),
        ({"step": "ship"}, "step", "ship"),
        ({"queue": "slow"}, "queue", "slow"),
        ({"priority": -5}, "priority", -5),
        ({"partition_key": "a"}, "partition_key", "a"),
        ({"unique_key": "ü"}, "unique_key", "ü".encode()),
        ({"unique_key": b"\x00"}, "unique_key", b"\x00"),
        ({"unique_key": "a"}, "unique_scope", LIVE),
        ({"unique_key": "a", "unique_scope": ()}, "unique_scope", ()),
        ({"unique_key": "a", "unique_scope": LIVE[:3]}, "unique_scope", LIVE),
        ({"unique_scope": LIVE}, "unique_scope", ()),
        ({"eligible_at": NOON}, "eligible_at", NOON),
        ({"schedule_at": NOON}, "eligible_at", NOON),
        ({"schedule_in": 5}, "delay", 5.0),
        ({"schedule_in": dt.timedelta(hours=1)}, "delay", 3600.0),
        ({"schedule_in": None, "schedule_at": None, "eligible_at": None}, "delay", 0.0),
        ({"on_duplicate": "return"}, "on_duplicate", "return"),
        ({"on_duplicate": "skip"}, "on_duplicate", "skip"),
        ({"tags": ["b", "a", "b"]}, "labels", Labels(("b", "a"), None)),
        ({"tags": iter(["a"]), "meta": {"k": [1]}}, "labels", Labels(("a",), b'{"k":[1]}')),
        ({"meta": MappingProxyType({"k": None})}, "labels", Labels((), b'{"k":null}')),
        ({"tags": (), "meta": {}}, "labels", None),
        ({"tags": None, "meta": None}, "labels", None),
    ],
)
def test_each_option(options, field, value):
    assert getattr(plan(**options), field) == value


FIRST, LAST = dt.datetime.min.replace(tzinfo=dt.UTC), dt.datetime.max.replace(tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("given", "hours", "stored"),
    [
        (LAST, -12, LAST),
        (LAST, 12, LAST - dt.timedelta(hours=12)),
        (FIRST, 14, FIRST),
        (FIRST, -14, FIRST + dt.timedelta(hours=14)),
    ],
)
def test_an_instant_at_the_end_of_the_calendar_stays_in_it(given, hours, stored):
    """In UTC its year would be 0 or 10000: the database has such instants, but no record of one could be read."""
    zone = dt.timezone(dt.timedelta(hours=hours))
    for option in ("eligible_at", "schedule_at"):
        found = plan(**{option: given.replace(tzinfo=zone)}).eligible_at
        assert (found, found.tzinfo) == (stored, dt.UTC)


@pytest.mark.parametrize("seconds", [16 * 3600, -23 * 3600, 1e-6], ids=str)
def test_an_offset_that_postgres_does_not_read(seconds: float):
    zone = dt.timezone(dt.timedelta(seconds=seconds))
    found = plan(schedule_at=NOON.astimezone(zone)).eligible_at
    assert (found, found.tzinfo) == (NOON, dt.UTC)


def test_a_step_by_reference():
    cls = checkout()
    assert da.plan_insert(cls.__durable__, {"step": cls.ship}).step == "ship"


def test_precedence_of_the_times():
    later = NOON + dt.timedelta(hours=1)
    found = plan(eligible_at=NOON, schedule_at=later, schedule_in=5)
    assert (found.eligible_at, found.delay) == (NOON, 0.0)
    assert plan(schedule_at=later, schedule_in=5).eligible_at == later


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prio": 1}, r"unknown insert option 'prio': did you mean priority\?"),
        ({"state": 1, "args": 1}, "two names for the same option"),
        ({"rate_limits": "x"}, "unknown insert option 'rate_limits': did you mean rate_limit"),
        ({"step": "nope"}, "shop:Checkout v2 has no step 'nope'; its steps are start, ship"),
        ({"step": 5}, "has no step 5"),
        ({"queue": ""}, "queue must not be empty"),
        ({"priority": 40_000}, "priority must be between"),
        ({"priority": "high"}, "priority must be an int"),
        ({"priority": True}, "priority must be an int"),
        ({"partition_key": ""}, "partition_key must not be empty"),
        ({"partition_key": "x" * 3000}, "partition_key must have at most 2000 bytes.*use a hash of it"),
        ({"unique_key": 5}, "unique_key must be str or bytes"),
        ({"unique_key": ""}, "unique_key must not be empty"),
        ({"unique_key": b""}, "unique_key must have 1 to 2000 bytes"),
        ({"unique_key": b"x" * 2001}, "unique_key must have 1 to 2000 bytes"),
        (
            {"unique_key": "a", "unique_scope": ["running"]},
            "unknown statuses 'running'; the statuses are runnable",
        ),
        ({"unique_key": "a", "unique_scope": "runnable"}, "unique_scope must be several statuses"),
        (
            {"unique_key": "a", "unique_scope": ["runnable"]},
            "empty or contain all live statuses; executing, awaiting",
        ),
        ({"unique_key": "a", "unique_scope": ["done"]}, "all live statuses"),
        ({"eligible_at": NOON.replace(tzinfo=None)}, "eligible_at must be a datetime with a time zone"),
        ({"schedule_at": "tomorrow"}, "schedule_at must be a datetime"),
        ({"schedule_in": -1}, "schedule_in must be a finite number"),
        ({"on_duplicate": "ignore"}, 'on_duplicate must be "raise", "return" or "skip"; it is \'ignore\''),
        ({"on_duplicate": None}, "on_duplicate must be"),
        ({"tags": "urgent"}, r"tags must be a list of texts, not one text: give \['urgent'\]"),
        ({"tags": 5}, "tags must be a list of texts; it is 5"),
        ({"tags": {"a": 1}}, "tags must be a list of texts; it is {"),
        ({"tags": ["a", ""]}, "each of tags must not be empty"),
        ({"tags": [None]}, "each of tags must be a str, not NoneType"),
        ({"tags": ["x" * 256]}, "each of tags must have at most 255 characters"),
        ({"tags": ["a\0"]}, "each of tags must not contain NUL"),
        ({"tags": repeat("a")}, "tags has more than 50 texts"),
        ({"meta": "x"}, "meta must be a dict; it is 'x'"),
        ({"meta": [("a", 1)]}, "meta must be a dict"),
        ({"meta": {"a": object()}}, r"meta: at \$.a: "),
        ({"meta": {"a": float("nan")}}, r"meta: at \$.a: nan is not JSON"),
        ({"meta": {"a": "x" * 70_000}}, "meta has 70008 bytes of JSON, the limit is 65536"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ConfigError, match=text):
        plan(**options)


def test_a_step_of_another_machine():
    class Other(da.Machine):
        @da.step
        async def start(self, ctx): ...

    with pytest.raises(ConfigError, match="belongs to another machine, not to shop:Checkout v2"):
        plan(step=Other.start)


def test_a_bad_state_names_the_step():
    with pytest.raises(
        StateError, match=r"shop:Checkout v2, step 'ship': the state .*\$\.order: Expected `int`"
    ):
        plan(state={"order": "x"}, step="ship")
    with pytest.raises(StateError):
        plan(state=None)


def test_a_job_without_arguments():
    @da.job
    def tick(): ...

    @da.job
    def maybe(args: Order | None): ...

    assert da.plan_insert(tick.__durable__, {}).state == b"{}"
    assert da.plan_insert(maybe.__durable__, {"args": None}).state == b"null"


def test_a_scope_is_closed_exactly_when_no_row_can_come_back_into_it():
    live = set(LIVE)
    for scope in chain.from_iterable(combinations(STATUSES, size) for size in range(len(STATUSES) + 1)):
        given = set(scope)
        completed = given | {"awaiting_children"} if given >= live - {"awaiting_children"} else given
        if not given or completed >= live:
            assert set(closed_scope(scope)) == completed
        else:
            with pytest.raises(ConfigError):
                closed_scope(scope)
