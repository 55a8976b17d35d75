"""`Backoff`: when a failed run is repeated. Pure."""

from datetime import timedelta

import durable_actors.machine as da
import pytest
from durable_actors.errors import ConfigError, DefinitionError
from durable_actors.machine import most_attempts, plan_insert, step_failure
from hypothesis import given, strategies as st

ERROR = ConnectionError("no answer")


def machine(policy: da.Backoff | None = None):
    class Checkout(da.Machine, name="shop:Checkout"):
        @da.step(retry=policy)
        async def start(self, ctx): ...

        @da.step
        async def ship(self, ctx): ...

    return Checkout.__durable__


def job(**options):
    return da.job(name="shop:mail", **options)(lambda args: None).__durable__


def fail(error, policy, attempt=0, limit=None, random=1.0):
    step = machine(policy).steps["start"]
    return step_failure(error, step, attempt=attempt, random=lambda: random, max_attempts=limit)


@given(
    attempt=st.integers(0, 10**6),
    random=st.floats(0, 1),
    factor=st.floats(1, 1000),
    jitter=st.floats(0, 1),
    initial=st.floats(0, 1e6),
)
def test_a_delay_lies_between_its_base_and_the_part_that_is_not_random(
    attempt, random, factor, jitter, initial
):
    policy = da.Backoff(initial=initial, factor=factor, maximum=3600, jitter=jitter)
    longest = policy.delay(attempt)
    assert longest <= 3600
    assert longest * (1 - jitter) * 0.999 <= policy.delay(attempt, random) <= longest
    assert longest <= policy.delay(attempt + 1)


def test_delays_grow_up_to_the_maximum():
    policy = da.Backoff(initial=timedelta(seconds=2), factor=3, maximum=20, jitter=0)
    assert [policy.delay(attempt) for attempt in range(4)] == [2, 6, 18, 20]
    assert da.Backoff().delay(3, random=0.0) == 4


def test_a_step_is_repeated_until_its_attempts_are_used_up():
    policy = da.Backoff(max_attempts=3, jitter=0)
    assert [fail(ERROR, policy, attempt) for attempt in range(3)] == [
        da.Retry(delay=1),
        da.Retry(delay=2),
        None,
    ]
    assert fail(ERROR, None) is None
    assert fail(ERROR, da.Backoff(jitter=0), 18) == da.Retry(delay=300)
    assert fail(ERROR, da.Backoff(), 19) is None


def test_the_insert_goes_before_the_definition():
    policy = da.Backoff(max_attempts=3, jitter=0)
    assert fail(ERROR, policy, 0, limit=1) is None
    assert fail(ERROR, policy, 3, limit=5) == da.Retry(delay=8)
    spec = job(max_attempts=3)
    assert isinstance(da.job_failure(ERROR, spec, attempt=4, random=lambda: 1.0, max_attempts=6), da.Retry)
    assert da.job_failure(ERROR, spec, attempt=0, random=lambda: 1.0, max_attempts=1) == da.Stop(ERROR)
    assert da.exhausted(spec, 3, 6) is None
    assert "max_attempts=2" in da.exhausted(spec, 2, 2).reason
    again = da.normalize_outcome(
        da.Retry(), spec, step="perform", attempt=1, random=lambda: 1.0, max_attempts=2
    )
    assert isinstance(again, da.Stop)


def test_only_some_exceptions_are_repeated():
    policy = da.Backoff(on=(ConnectionError, TimeoutError), jitter=0)
    assert fail(ERROR, policy) == da.Retry(delay=1)
    assert fail(ValueError("no"), policy) is None
    assert fail(ExceptionGroup("nursery", [ERROR, TimeoutError()]), policy) == da.Retry(delay=1)
    assert fail(ExceptionGroup("nursery", [ERROR, ValueError("no")]), policy) is None


def test_a_job_takes_a_backoff():
    spec = job(backoff=da.Backoff(initial=5, jitter=0, max_attempts=3, on=ConnectionError))
    assert spec.max_attempts == 3
    fate = [da.job_failure(ERROR, spec, attempt=each, random=lambda: 1.0) for each in range(3)]
    assert fate == [da.Retry(delay=5), da.Retry(delay=10), da.Stop(ERROR)]
    other = ValueError("no")
    assert da.job_failure(other, spec, attempt=0, random=lambda: 1.0) == da.Stop(other)
    assert isinstance(da.job_failure("a reason", spec, attempt=0, random=lambda: 1.0), da.Retry)
    assert job(max_attempts=7, backoff=da.Backoff()).max_attempts == 7


def test_a_job_class_takes_a_backoff():
    class Mail(da.Machine, name="shop:mail class"):
        backoff = da.Backoff(max_attempts=4)

        async def perform(self, args): ...

    assert Mail.__durable__.max_attempts == 4


def test_how_many_there_are_for_people():
    spec = machine(da.Backoff(max_attempts=5))
    assert [most_attempts(spec, step, None) for step in ("start", "ship", "gone")] == [5, None, None]
    assert most_attempts(spec, "start", 2) == 2
    assert most_attempts(job(), "perform", None) == 20


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_attempts": 0}, "max_attempts= must be between 1"),
        ({"max_attempts": 2.5}, "max_attempts= must be an int"),
        ({"initial": -1}, "must be a finite number"),
        ({"maximum": float("inf")}, "must be a finite number"),
        ({"factor": 0.5}, "factor= must be a number from 1 to 1000"),
        ({"factor": "2"}, "factor= must be a number"),
        ({"jitter": 1.5}, "jitter= must be a number from 0 to 1"),
        ({"jitter": float("nan")}, "jitter= must be a number"),
        ({"on": "ConnectionError"}, "on= must be an exception class"),
        ({"on": ()}, "on= must be an exception class"),
        ({"on": KeyboardInterrupt}, "on= must be an exception class"),
    ],
)
def test_a_wrong_backoff_is_an_error_at_definition(options, text):
    with pytest.raises(DefinitionError, match=text):
        da.Backoff(**options)


def test_wrong_uses_are_errors_at_definition():
    with pytest.raises(DefinitionError, match=r"@step\(retry=...\) must be a Backoff"):
        machine(5)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="max_attempts=7, but its Backoff has max_attempts=3"):
        job(max_attempts=7, backoff=da.Backoff(max_attempts=3))
    with pytest.raises(DefinitionError, match="backoff= must be a Backoff"):
        job(backoff=da.Backoff)


def test_an_insert_says_how_many():
    assert plan_insert(job(), {"args": 1, "max_attempts": 3}).max_attempts == 3
    assert plan_insert(job(), {"args": 1}).max_attempts is None
    assert plan_insert(machine(da.Backoff()), {"max_attempts": 3}).max_attempts == 3
    with pytest.raises(ConfigError, match="has none: give a step retry="):
        plan_insert(machine(), {"max_attempts": 3})
    for wrong in (0, -1, True, "3", 2**31):
        with pytest.raises(ConfigError, match="max_attempts must be"):
            plan_insert(job(), {"args": 1, "max_attempts": wrong})  # type: ignore[typeddict-item]
