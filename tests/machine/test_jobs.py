"""`@job`: the function stays a function; the definition is read from its signature."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
import durable_actors.machine as da
import pytest
from durable_actors.errors import DefinitionError

if TYPE_CHECKING:
    from fractions import Fraction


@attrs.frozen
class Email:
    to: str
    subject: str = ""


def spec(job):
    return job.__durable__


async def test_the_function_stays_callable(registry):
    @da.job
    async def send(args: Email, ctx: da.Context[Email]) -> str:
        """Send it."""
        return f"{args.to} {ctx.attempt}"

    context = da.Context(state=Email("a"), attempt=2)
    assert await send(Email("b"), context) == "b 2"
    assert await send(ctx=context, args=Email("c")) == "c 2"
    assert (send.__name__, send.__doc__) == ("send", "Send it.")
    assert list(inspect.signature(send).parameters) == ["args", "ctx"]
    assert await spec(send).steps["perform"].call(context) == "a 2"
    assert registry.get(spec(send).name, 1) is spec(send)
    assert repr(send) == f"<job {spec(send).name} v1>"


def test_the_defaults():
    @da.job
    def work(args):
        return args

    found = spec(work)
    assert found.name == f"{__name__}:test_the_defaults.<locals>.work"
    assert (found.version, found.kind, found.queue, found.initial) == (1, "job", "default", "perform")
    assert (found.max_attempts, found.backoff, found.steps["perform"].timeout) == (20, None, None)
    assert found.codec.type is Any
    assert not found.steps["perform"].is_async


def test_the_options():
    @da.job(
        queue="mail",
        max_attempts=3,
        backoff=lambda attempt: attempt,
        name="mail",
        version=2,
        timeout=timedelta(0, 5),
    )
    def work(args: Email): ...

    found = spec(work)
    assert (found.name, found.version, found.queue, found.max_attempts) == ("mail", 2, "mail", 3)
    assert found.backoff(7) == 7
    assert found.steps["perform"].timeout == 5.0
    assert found.codec.type is Email


def test_empty_parentheses():
    @da.job()
    def work(args): ...

    assert spec(work).kind == "job"


def test_what_it_takes():
    @da.job
    def nothing():
        return "nothing"

    @da.job
    def args_only(args: Email):
        return args

    @da.job
    def ctx_only(ctx: da.Context[Email]):
        return ctx.state

    @da.job
    def ctx_by_type(c: da.Context[Email]):
        return c.state

    @da.job
    def both(args: Email, ctx):
        return args, ctx.state

    @da.job
    def unused(args: Email, _ctx):
        return args

    @da.job
    def second_by_type(args: Email, c: da.Context[Email]):
        return args, c.state

    @da.job
    def defaults(args: Email, retries: int = 3, *rest, verbose: bool = False, **more):
        return args, retries

    @da.job
    def positional(args: Email, ctx=None, /):
        return ctx.state

    email = Email("a")
    expected = {
        nothing: "nothing",
        args_only: email,
        ctx_only: email,
        ctx_by_type: email,
        both: (email, email),
        unused: email,
        second_by_type: (email, email),
        defaults: (email, 3),
        positional: email,
    }
    for job, result in expected.items():
        assert spec(job).steps["perform"].call(da.Context(state=email)) == result, job
        assert spec(job).codec.type is (Any if job is nothing else Email), job
    assert [spec(job).steps["perform"].wants_ctx for job in (nothing, args_only, both)] == [
        False,
        False,
        True,
    ]


def test_a_string_annotation_may_name_a_local_class():
    @attrs.frozen
    class Local:
        n: int

    @da.job
    def bare(args: Local): ...

    @da.job(queue="x")
    def with_options(args: list[Local]): ...

    assert spec(bare).codec.type is Local
    assert spec(with_options).codec.type == list[Local]


def test_other_annotations_are_not_evaluated():
    @da.job
    def work(args: Email, ctx: Missing = None) -> Fraction: ...  # noqa: F821 - on purpose

    assert spec(work).codec.type is Email


def test_an_annotation_that_cannot_be_resolved():
    with pytest.raises(
        DefinitionError, match=r"the annotation 'Fraction' of args cannot be resolved .*TYPE_CHECKING"
    ):

        @da.job
        def work(args: Fraction): ...


def test_an_annotation_that_is_no_type():
    with pytest.raises(DefinitionError, match="of args is not a type"):

        @da.job
        def work(args: "not a type"): ...  # noqa: F722 - on purpose


@pytest.mark.parametrize(
    ("func", "text"),
    [
        (5, "a job must be a function"),
        (Email, "a job must be a function"),
        (len, "a job must be a function"),
        (lambda to, subject: None, "'subject' does not look like one; write <lambda>"),
        (lambda args, ctx, more: None, "too many arguments"),
        (lambda args, *, more: None, "keyword argument more"),
        (lambda *args: None, r"one value, not with \*args"),
        (lambda **kwargs: None, r"one value, not with \*args or \*\*kwargs"),
        (lambda self, args: None, "is a method; @da.job decorates functions"),
    ],
)
def test_what_cannot_be_a_job(func, text):
    with pytest.raises(DefinitionError, match=text):
        da.job(func)


def test_a_job_that_yields():
    def generator(args):
        yield

    async def async_generator(args):
        yield

    for func in (generator, async_generator):
        with pytest.raises(DefinitionError, match="yields; a job returns its result"):
            da.job(func)


def test_a_job_twice():
    with pytest.raises(DefinitionError, match="not Job"):

        @da.job
        @da.job
        def work(args): ...


async def a_coroutine(attempt): ...


def plain(args): ...


def test_a_lambda_needs_a_name():
    with pytest.raises(DefinitionError, match="a lambda has no name of its own"):
        da.job(lambda args: None)
    assert spec(da.job(name="short")(lambda args: None)).name == "short"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"queue": ""}, "queue="),
        ({"queue": 5}, "queue="),
        ({"max_attempts": 0}, "max_attempts="),
        ({"max_attempts": 1.5}, "max_attempts="),
        ({"backoff": 5}, "backoff= must be a Backoff"),
        ({"backoff": a_coroutine}, "backoff= must be a Backoff"),
        ({"name": ""}, "name="),
        ({"version": 0}, "version="),
        ({"timeout": 0}, "timeout="),
        ({"timeout": "1"}, "timeout="),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(DefinitionError, match=text):
        da.job(**options)(plain)


def test_arguments_that_cannot_be_stored():
    class Plain: ...

    with pytest.raises(DefinitionError, match=r"Plain at \$ of the state type .*Plain cannot be stored"):

        @da.job
        def work(args: Plain): ...


def test_a_wrapper_around_a_job_is_no_job():
    @da.job
    def work(args): ...

    wrapper = lambda args: work(args)  # noqa: E731 - what functools.wraps gives
    wrapper.__dict__.update(work.__dict__)
    assert da.spec_of(work) is not None
    assert da.spec_of(wrapper) is None
