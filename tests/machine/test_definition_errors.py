"""Every mistake in a definition is found when the class is made, and the text tells the remedy."""

import abc
import functools

import attrs
import durable_actors.machine as da
import msgspec
import pytest
from durable_actors.errors import DefinitionError


@attrs.frozen
class Order:
    order: int


async def good(self, ctx):
    return da.Done()


def body(**members):
    """A class body with a good step and these members."""
    return {"start": da.step(good_copy()), **members}


def good_copy():
    async def start(self, ctx):
        return da.Done()

    return start


def make(members=None, *, bases=(da.Machine,), **keywords):
    members = body() if members is None else members
    return type(da.Machine)(
        "Broken", bases, {"__module__": __name__, "__qualname__": "Broken", **members}, **keywords
    )


def test_the_builder_itself_is_fine():
    assert make().__durable__.initial == "start"


def test_both_steps_and_perform():
    with pytest.raises(DefinitionError, match=r"Broken has both steps \(start\) and perform: remove perform"):
        make(body(perform=lambda self, args: None))


def test_neither():
    with pytest.raises(DefinitionError, match="neither a step nor perform: give it a method start"):
        make({})


def test_neither_names_the_methods_that_look_like_steps():
    with pytest.raises(DefinitionError, match=r"decorate its steps with @da.step \(begin, ship\?\)"):
        make({"begin": good, "ship": good, "_helper": good, "other": lambda self: None, "State": None})


def test_unknown_initial():
    with pytest.raises(DefinitionError, match=r"no initial step 'begin'; its steps are start\. Mark one"):
        make(initial="begin")
    with pytest.raises(DefinitionError, match=r"no initial step 'start'; its steps are ship"):
        make({"ship": da.step(good_copy())})
    with pytest.raises(DefinitionError, match="initial= must be a str"):
        make(initial=5)


def test_two_initial_steps():
    members = {"a": da.step(initial=True)(good_copy()), "b": da.step(initial=True)(good_copy())}
    with pytest.raises(DefinitionError, match=r"has 2 initial steps \(a, b\): mark only one"):
        make(members)


def test_keyword_and_mark_disagree():
    members = {"a": da.step(initial=True)(good_copy()), "b": da.step(good_copy())}
    with pytest.raises(DefinitionError, match=r"has initial='b' and marks a as initial"):
        make(members, initial="b")
    assert make(members, initial="a").__durable__.initial == "a"


def test_a_duplicate_name_and_version():
    make(name="same", version=2)

    def elsewhere():
        class Other(da.Machine, name="same", version=2):
            @da.step
            async def start(self, ctx): ...

    with pytest.raises(
        DefinitionError, match=r"same v2 is defined twice, by .*:Broken and by .*elsewhere.*Other"
    ):
        elsewhere()


def test_the_failed_definition_is_not_registered(registry):
    with pytest.raises(DefinitionError):
        make({})
    assert len(registry) == 0


def test_a_step_of_another_machine():
    other = make()
    with pytest.raises(
        DefinitionError, match=r"Mine.borrowed is the step <step Broken.start> of another class; inherit"
    ):

        class Mine(da.Machine):
            borrowed = other.start

            @da.step
            async def start(self, ctx): ...

    with pytest.raises(DefinitionError, match="of another class"):

        class Bound(da.Machine):
            start = other().start


def test_one_step_under_two_names():
    with pytest.raises(DefinitionError, match=r"one step has several names \(again, start\)"):

        class Twice(da.Machine):
            @da.step
            async def start(self, ctx): ...

            again = start


def test_hiding_a_step_by_a_plain_method():
    base = make()
    with pytest.raises(
        DefinitionError, match=r"Sub.start hides the step Broken.start: decorate it with @da.step"
    ):

        class Sub(base):
            async def start(self, ctx): ...


@pytest.mark.parametrize("name", ["handle", "perform", "backoff", "State"])
def test_reserved_names(name):
    with pytest.raises(DefinitionError, match=f"a step cannot be named {name}"):
        make(body(**{name: da.step(good_copy())}))


def test_names_with_two_underscores():
    with pytest.raises(DefinitionError, match="two underscores"):
        make(body(__call__=da.step(good_copy())))


@pytest.mark.parametrize(
    ("decorated", "text"),
    [
        (5, "decorates a method"),
        (None, "decorates a method"),
        (Order, "not a class"),
        (functools.partial(good), "decorates a method"),
        (staticmethod(good), "remove @staticmethod"),
        (classmethod(good), "remove @classmethod"),
        (da.step(good_copy()), "twice"),
        (len, "decorates a method"),
    ],
)
def test_what_cannot_be_a_step(decorated, text):
    with pytest.raises(DefinitionError, match=text):
        da.step(initial=False)(decorated)


def test_a_step_with_the_wrong_parameters():
    def no_ctx(self): ...

    def too_many(self, ctx, more): ...

    def keyword_only(self, ctx, *, more): ...

    def nothing(): ...

    for func in (no_ctx, too_many, keyword_only, nothing):
        with pytest.raises(
            DefinitionError, match=rf"{func.__name__}.* cannot be called .*write def \w+\(self, ctx\)"
        ):
            da.step(func)

    def defaults(self, ctx, more=1): ...

    def any_(self, *args): ...

    for func in (defaults, any_):
        da.step(func)


def test_a_step_that_yields():
    def generator(self, ctx):
        yield

    async def async_generator(self, ctx):
        yield

    for func in (generator, async_generator):
        with pytest.raises(DefinitionError, match="is a generator; it must return its outcome"):
            da.step(func)


@pytest.mark.parametrize("timeout", [0, -1, "5", float("nan"), float("inf"), True])
def test_bad_timeouts(timeout):
    with pytest.raises(DefinitionError, match=r"@step\(timeout=...\)"):
        da.step(timeout=timeout)


def test_bad_initial_flag():
    with pytest.raises(DefinitionError, match=r"@step\(initial=...\) must be True or False"):
        da.step(initial="yes")


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, 2**31])
def test_bad_versions(version):
    with pytest.raises(DefinitionError, match="Broken: version="):
        make(version=version)


@pytest.mark.parametrize("keyword", ["queue", "name"])
@pytest.mark.parametrize("value", ["", 5, "a\0", "\ud800", "x" * 256, b"x"])
def test_bad_names_and_queues(keyword, value):
    with pytest.raises(DefinitionError, match=f"Broken: {keyword}="):
        make(**{keyword: value})


def test_names_that_look_like_the_address_of_a_step():
    with pytest.raises(DefinitionError, match=r"Broken: name= must not contain the character U\+001F"):
        make(name="a\x1f1\x1fstart")
    with pytest.raises(DefinitionError, match=r"a step's name must not contain the character U\+001F"):
        make(body(**{"a\x1fb": da.step(good_copy())}))
    with pytest.raises(DefinitionError, match="a step's name must have at most 255 characters"):
        make(body(**{"x" * 256: da.step(good_copy())}))


def test_bad_run_ahead():
    with pytest.raises(DefinitionError, match="run_ahead= must be True or False"):
        make(run_ahead="no")


def test_an_unknown_keyword():
    with pytest.raises(TypeError, match="quue"):
        make(quue="x")


def test_max_attempts_is_for_jobs():
    with pytest.raises(
        DefinitionError, match=r"max_attempts= is for jobs; give a step retry=da.Backoff\(max_attempts=...\)"
    ):
        make(max_attempts=5)


@pytest.mark.parametrize("number", [0, -1, "3", 1.5, True])
def test_bad_max_attempts(number):
    with pytest.raises(DefinitionError, match="max_attempts="):
        make({"perform": lambda self, args: None}, max_attempts=number)


def test_initial_is_not_for_jobs():
    with pytest.raises(DefinitionError, match="initial= is for machines with steps"):
        make({"perform": lambda self, args: None}, initial="perform")


def test_a_job_has_no_handle():
    async def handle(self, error, ctx): ...

    with pytest.raises(DefinitionError, match="has both perform and handle"):
        make({"perform": lambda self, args: None, "handle": handle})


def test_bad_performs():
    async def yields(self, args):
        yield

    for perform, text in [
        (5, "not int"),
        (lambda: None, "has no self"),
        (lambda self, to, subject: None, "does not look like one"),
        (lambda self, args, ctx, more: None, "too many"),
        (lambda self, args, *, more: None, "keyword argument more"),
        (yields, "yields"),
        (staticmethod(lambda args: None), "not staticmethod"),
    ]:
        with pytest.raises(DefinitionError, match=text):
            make({"perform": perform})


def test_bad_backoff_methods():
    async def coroutine(self, attempt): ...

    for backoff, text in [
        (5, "plain method"),
        (coroutine, "plain method"),
        (lambda self: 1, "cannot be called"),
    ]:
        with pytest.raises(DefinitionError, match=text):
            make({"perform": lambda self, args: None, "backoff": backoff})


def test_bad_handles():
    for handle, text in [(5, "handle must be a method"), (lambda self, error: None, "cannot be called")]:
        with pytest.raises(DefinitionError, match=text):
            make(body(handle=handle))


def test_a_constructor_with_arguments():
    def init(self, client): ...

    with pytest.raises(
        DefinitionError, match="__init__ takes arguments, but a new object is created for every step"
    ):
        make(body(__init__=init))
    make(body(__init__=lambda self, client=None: None))


def test_a_step_that_is_left_abstract():
    class Base(da.Machine, abc.ABC):
        @da.step
        @abc.abstractmethod
        async def start(self, ctx): ...

        @abc.abstractmethod
        def url(self): ...

    with pytest.raises(
        DefinitionError, match="Partial leaves start, url abstract: define it, or also inherit from"
    ):

        class Partial(Base): ...

    class Complete(Base):
        @da.step
        async def start(self, ctx): ...

        def url(self): ...

    Complete()


def test_two_state_types():
    with pytest.raises(DefinitionError, match=r"two state types, Machine\[Order\] and state=dict"):

        class Both(da.Machine[Order], state=dict):
            @da.step
            async def start(self, ctx): ...


def test_a_state_type_in_quotes():
    with pytest.raises(DefinitionError, match="write it without quotes"):

        class Quoted(da.Machine["Order"]):
            @da.step
            async def start(self, ctx): ...


class Plain:
    x: int


@attrs.frozen
class Deep:
    items: list[dict[str, Plain]]


@attrs.define
class Private:
    _secret: int = 0


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (Plain, r"Plain at \$ of the state type Plain cannot be stored; use attrs"),
        (Deep, r"Plain at \$\.items\[...\]\[...\] of the state type Deep cannot be stored"),
        (complex, "complex at"),
        (dict[str, msgspec.Raw], r"Raw at \$\[...\]"),
        (Private, "the field _secret of Private would not be stored .* rename it to secret"),
        (Order | Deep, "cannot be stored: Type unions"),
        (5, "cannot be stored"),
    ],
)
def test_state_types_that_cannot_be_stored(type_, text):
    with pytest.raises(DefinitionError, match=text):
        make(state=type_)


def test_machine_itself_is_no_machine():
    assert da.Machine.__durable__ is None
