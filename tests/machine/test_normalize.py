"""What a step or job gave back becomes an outcome, or an error that says what was probably meant."""

import durable_actors.machine as da
import pytest
from durable_actors.errors import InvalidOutcome


def machine():
    class Checkout(da.Machine, name="shop:Checkout"):
        @da.step
        async def start(self, ctx): ...

        @da.step
        async def ship(self, ctx): ...

    return Checkout


def job(**options):
    return da.job(name="shop:mail", **options)(lambda args: None).__durable__


def normalize(value, spec, *, attempt=0, source="step"):
    return da.normalize_outcome(value, spec, step="start", attempt=attempt, random=lambda: 1.0, source=source)


def test_good_outcomes_pass_unchanged():
    cls = machine()
    for outcome in (
        da.Next(cls.ship, {"a": 1}),
        da.Next(cls().ship),
        da.Next("ship"),
        da.Retry(delay=5),
        da.Await("x"),
        da.Await("x", then="ship"),
        da.ScheduleChildren(cls.ship, []),
        da.Done(1),
        da.Stop("x"),
    ):
        assert normalize(outcome, cls.__durable__) is outcome


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            None,
            "return Next, Retry, Await, ScheduleChildren, Pause, Approval, Done or Stop (was a `return` forgotten?)",
        ),
        (da.Done, "the class Done; return an object of it: Done(...)"),
        (da.Next, "the class Next;"),
        (da.Error("x"), "Error, which is for jobs"),
        (da.Cancel("x"), "Cancel, which is for jobs"),
        (ValueError("no"), "an exception; raise it, or return Stop(error): ValueError: no"),
        ({"a": 1}, "{'a': 1}; return Next"),
        ("ship", "'ship'; return Next"),
        (5, "5; return"),
        (da.Next("shipp"), "goes to the unknown step 'shipp'; the steps of the machine are start, ship"),
        (da.Await("x", then="nope"), "unknown step 'nope'"),
        (da.ScheduleChildren("nope", []), "unknown step 'nope'"),
    ],
)
def test_bad_outcomes_of_a_machine(value, text):
    with pytest.raises(InvalidOutcome) as caught:
        normalize(value, machine().__durable__)
    assert str(caught.value).startswith("shop:Checkout v1, step 'start' ")
    assert text in str(caught.value)


def test_the_text_names_handle():
    with pytest.raises(InvalidOutcome, match="shop:Checkout v1, handle for step 'start' returned None"):
        normalize(None, machine().__durable__, source="handle")


def test_a_step_of_another_machine():
    class Other(da.Machine):
        @da.step
        async def start(self, ctx): ...

    for outcome in (
        da.Next(Other.start),
        da.Await("x", then=Other.start),
        da.ScheduleChildren(Other.start, []),
    ):
        with pytest.raises(
            InvalidOutcome, match=r"goes to the step .*Other.start, which belongs to another machine"
        ):
            normalize(outcome, machine().__durable__)


def test_steps_of_a_base_and_of_an_overriding_class():
    base = machine()

    class Sub(base, name="sub"):
        @da.step
        async def ship(self, ctx): ...

        @da.step
        async def more(self, ctx): ...

    spec = Sub.__durable__
    for reference in (base.ship, Sub.ship, Sub().ship, Sub().start, Sub.more):
        normalize(da.Next(reference), spec)
    with pytest.raises(InvalidOutcome, match="another machine"):
        normalize(da.Next(Sub.more), base.__durable__)


def test_references_survive_a_reload():
    old, new = machine(), machine()
    normalize(da.Next(new.ship), old.__durable__)
    normalize(da.Next(old.ship), new.__durable__)


def test_a_forgotten_await_is_closed_and_named(recwarn):
    async def work():
        return da.Done()

    for spec in (machine().__durable__, job()):
        with pytest.raises(InvalidOutcome, match="a coroutine; `await` it"):
            normalize(work(), spec)


def test_an_object_that_cannot_be_printed():
    class Rude:
        def __repr__(self):
            raise RuntimeError

    with pytest.raises(InvalidOutcome, match="returned <Rude instance at"):
        normalize(Rude(), machine().__durable__)
    with pytest.raises(InvalidOutcome, match="returned <int of"):
        normalize(10**5000, machine().__durable__)


def test_another_awaitable():
    class Future:
        def __await__(self):
            yield

    with pytest.raises(InvalidOutcome, match="an awaitable Future; await it"):
        normalize(Future(), job())


@pytest.mark.parametrize("value", [None, 0, "", {"a": 1}, [1], True, da.Signal(1, "x")])
def test_whatever_a_job_returns_is_its_result(value):
    assert normalize(value, job()) == da.Done(value)


ERROR = ValueError("no")


@pytest.mark.parametrize(
    ("value", "attempt", "expected"),
    [
        (da.Error("x"), 0, da.Retry(delay=1)),
        (da.Error("x"), 1, da.Retry(delay=2)),
        (da.Error("x"), 2, da.Stop("x")),
        (da.Error("x"), 7, da.Stop("x")),
        (da.Cancel("no"), 0, da.Stop("no")),
        (da.Retry(delay=9), 1, da.Retry(delay=9)),
        (da.Retry({"a": 1}), 0, da.Retry({"a": 1})),
        (da.Retry(), 2, da.Stop("shop:mail v1 asked for a retry after 3 executions (max_attempts)")),
        (da.Done(5), 0, da.Done(5)),
        (da.Stop("x"), 0, da.Stop("x")),
    ],
)
def test_outcomes_of_a_job_with_three_attempts(value, attempt, expected):
    assert normalize(value, job(max_attempts=3), attempt=attempt) == expected


@pytest.mark.parametrize("value", [da.Next("x"), da.Await("x"), da.ScheduleChildren("x", [])])
def test_a_job_has_one_step(value):
    with pytest.raises(InvalidOutcome, match=r"a job has one step .* write a machine"):
        normalize(value, job())


@pytest.mark.parametrize("value", [da.Retry, da.Error, da.Cancel, da.Done])
def test_a_job_returning_the_class(value):
    with pytest.raises(InvalidOutcome, match=f"the class {value.__name__};"):
        normalize(value, job())


def fail(error, spec, attempt=0, random=1.0):
    return da.job_failure(error, spec, attempt=attempt, random=lambda: random)


def test_a_failed_job_is_retried_with_jitter():
    assert fail(ERROR, job(), 3, random=0.0) == da.Retry(delay=4)
    assert fail(ERROR, job(), 3, random=1.0) == da.Retry(delay=8)
    assert fail(ERROR, job(), 18) == da.Retry(delay=300)
    assert fail(ERROR, job(), 19) == da.Stop(ERROR)


def test_the_number_of_executions_is_max_attempts():
    spec = job(max_attempts=4)
    executions = 0
    attempt = 0
    while da.exhausted(spec, attempt) is None:
        executions += 1
        if isinstance(fail(ERROR, spec, attempt), da.Stop):
            break
        attempt += 1
    assert executions == 4


def test_one_attempt_means_no_retry():
    assert fail(ERROR, job(max_attempts=1)) == da.Stop(ERROR)


def test_own_backoff():
    assert fail(ERROR, job(backoff=lambda attempt: 10 + attempt), 2) == da.Retry(delay=12)


@pytest.mark.parametrize("delay", [-1, float("nan"), "soon", None])
def test_a_bad_backoff_is_named(delay):
    with pytest.raises(InvalidOutcome, match=r"shop:mail v1: backoff\(2\) must be"):
        fail(ERROR, job(backoff=lambda attempt: delay), 2)


def test_cancel_ends_a_job_also_out_of_a_nursery():
    cancel = da.Cancel("no stock")
    assert fail(cancel, job()) == da.Stop("no stock")
    group = ExceptionGroup("nursery", [ERROR, ExceptionGroup("inner", [cancel])])
    assert fail(group, job()) == da.Stop("no stock")
    assert fail(ExceptionGroup("nursery", [ERROR]), job()) == da.Retry(delay=1)


def test_a_job_that_kills_its_worker_ends():
    spec = job(max_attempts=3)
    assert da.exhausted(spec, 2) is None
    stopped = da.exhausted(spec, 3)
    assert isinstance(stopped, da.Stop)
    assert "executed 3 times (max_attempts=3) and never finished" in stopped.reason
    assert da.exhausted(machine().__durable__, 10**6) is None
