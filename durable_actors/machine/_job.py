"""`@job`: a function that runs to completion, with retries. The short form of a one-step machine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import attrs

from durable_actors._journal_level import JournalLevel
from durable_actors._limits import RateLimit, Slot, text_of
from durable_actors._scheduling.schedule import Missed, Overlap, Schedule
from durable_actors.errors import ConfigError, DefinitionError
from durable_actors.machine._backoff import DEFAULT_MAX_ATTEMPTS, Backoff
from durable_actors.machine._checks import Duration, Keep, keep_seconds, seconds
from durable_actors.machine._codec import StateCodec
from durable_actors.machine._definition import (
    check_backoff,
    check_name,
    check_queue,
    check_version,
    default_name,
    job_attempts,
    optional_journal,
)
from durable_actors.machine._job_form import job_call, job_form
from durable_actors.machine._outcome import Stop
from durable_actors.machine._registry import current_registry
from durable_actors.machine._spec import HandleSpec, MachineSpec, StepSpec, identity_of

P = ParamSpec("P")
R = TypeVar("R")


class Job(Generic[P, R]):
    """A job function decorated with `@job`. Calling it runs it directly; `insert` runs it durably."""

    __durable__: MachineSpec

    def __init__(self, func: Callable[P, R]) -> None:
        functools.update_wrapper(self, func)
        self._func = func

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, for example in a test. Nothing is stored."""
        return self._func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job {self.__durable__}>"


@attrs.frozen
class JobDecorator:
    """`@job(...)` with its options, before it is applied to the function."""

    queue: str
    max_attempts: int
    backoff: Callable[[int], Duration] | Backoff | None
    name: str | None
    version: int
    timeout: Duration | None
    journal: JournalLevel | None
    keep: Keep
    times: Mapping[str, Any]
    """`cron` and the rest, if it is started by itself."""
    limits: str | None = None
    """The limits that it uses (`_limits.text_of`)."""

    def __call__(self, func: Callable[P, R], /) -> Job[P, R]:
        """Turn the function into a job and register it."""
        return self.define(func, _names_of_caller(2))

    def define(self, func: Callable[P, R], names: dict[str, Any]) -> Job[P, R]:
        """Define and register the job; `names` are the local names where it is defined."""
        form = job_form(func, method=False, names=names)
        assert isinstance(func, FunctionType)
        subject = func.__qualname__
        name = check_name(default_name(func) if self.name is None else self.name, subject)
        version = check_version(self.version, subject)
        limit = None
        if self.timeout is not None:
            limit = seconds(self.timeout, what=f"{subject}: timeout=", error=DefinitionError, positive=True)
        check_backoff(self.backoff, subject)
        job: Job[P, R] = Job(func)
        identity = identity_of(func)
        step = StepSpec(
            name="perform",
            func=func,
            call=job_call(func, form),
            is_async=inspect.iscoroutinefunction(func),
            timeout=limit,
            wants_ctx=form.wants_ctx,
            limits=self.limits,
        )
        job.__durable__ = MachineSpec(
            name=name,
            version=version,
            kind="job",
            queue=check_queue(self.queue, subject),
            initial="perform",
            steps={"perform": step},
            codec=StateCodec(form.args_type, machine=name, version=version),
            handle=HandleSpec(call=lambda error, _ctx: Stop(error), is_async=False, is_default=True),
            max_attempts=job_attempts(self.max_attempts, self.backoff, subject),
            backoff=self.backoff,
            run_ahead=True,
            journal=optional_journal(self.journal, subject),
            keep=keep_seconds(self.keep, what=f"{subject}: keep=", error=DefinitionError),
            definition=job,
            identity=identity,
            lineage=frozenset({identity}),
            schedule=self._schedule(name, job, subject),
        )
        current_registry().register(job.__durable__)
        return job

    def _schedule(self, name: str, job: object, subject: str) -> Schedule | None:
        times = {option: value for option, value in self.times.items() if value is not None}
        if not times:
            return None
        try:
            return Schedule(name, job, **times)
        except ConfigError as error:
            raise DefinitionError(f"{subject}: {error}") from error


@overload
def job(func: Callable[P, R], /) -> Job[P, R]: ...
@overload
def job(
    *,
    queue: str = "default",
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    backoff: Callable[[int], Duration] | Backoff | None = None,
    name: str | None = None,
    version: int = 1,
    timeout: Duration | None = None,
    journal: JournalLevel | None = None,
    keep: Keep = "default",
    rate_limit: RateLimit = None,
    weight: int = 1,
    slot: Slot = None,
    cron: str | None = None,
    every: Duration | None = None,
    tz: str | None = None,
    args: object = None,
    overlap: Overlap | None = None,
    missed: Missed | None = None,
    jitter: Duration | None = None,
) -> JobDecorator: ...
def job(
    func: Callable[P, R] | None = None,
    /,
    *,
    queue: str = "default",
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    backoff: Callable[[int], Duration] | Backoff | None = None,
    name: str | None = None,
    version: int = 1,
    timeout: Duration | None = None,
    journal: JournalLevel | None = None,
    keep: Keep = "default",
    rate_limit: RateLimit = None,
    weight: int = 1,
    slot: Slot = None,
    cron: str | None = None,
    every: Duration | None = None,
    tz: str | None = None,
    args: object = None,
    overlap: Overlap | None = None,
    missed: Missed | None = None,
    jitter: Duration | None = None,
) -> Job[P, R] | JobDecorator:
    """Turn a function into a durable job. Use it as `@job` or with options.

    The function takes its arguments as one value (typed by the annotation of the first parameter) and optionally
    the context. Its return value is the result. If it raises an exception or returns `Error`, it runs again after
    `backoff(attempt)` seconds, or as a `Backoff` says (default: `min(2 ** attempt, 300)` with jitter), up to
    `max_attempts` executions in all. `Cancel`, raised or returned, fails the job at once; `Retry(delay=...)` sets the
    delay. `journal` is how much of its history is recorded; default: what the engine says. `keep` is how long it is
    kept after its end (None: for ever; 0: it is deleted when it is done); default: what the engine's `Retention` says.

    With `cron` (`"0 3 * * *"`, in the time zone `tz`) or `every` (seconds) it is started by itself, with `args`, while
    an engine runs that has it in its code. `overlap`, `missed` and `jitter` are those of `Schedule`, which can do more;
    the schedule has the name of the job.

    `rate_limit`, `weight` and `slot` are the limits that it uses, unless the insert names others.
    """
    times = {
        "cron": cron,
        "every": every,
        "tz": tz,
        "args": args,
        "overlap": overlap,
        "missed": missed,
        "jitter": jitter,
    }
    limits = text_of(rate_limit, weight, slot, error=DefinitionError)
    decorator = JobDecorator(
        queue, max_attempts, backoff, name, version, timeout, journal, keep, times, limits
    )
    return decorator if func is None else decorator.define(func, _names_of_caller(2))


def _names_of_caller(depth: int) -> dict[str, Any]:
    """Return the local names at the decorator: a string annotation may name a class defined there."""
    frame = inspect.currentframe()
    for _ in range(depth):
        frame = frame and frame.f_back
    return {} if frame is None else dict(frame.f_locals)
