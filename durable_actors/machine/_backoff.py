"""When a failed run is repeated: the default delay of jobs, and `Backoff`. Pure: the random number is an argument."""

from __future__ import annotations

from typing import Any, Final, cast

import attrs

from durable_actors._option_checks import shown
from durable_actors.errors import DefinitionError
from durable_actors.machine._checks import Duration, seconds, whole

CEILING = 300.0
"""Seconds: the longest delay. With jitter, a job that keeps failing runs every 2.5 to 5 minutes."""

DEFAULT_MAX_ATTEMPTS = 20
"""Executions of a job, and runs of a step with a `Backoff`, unless it says otherwise. With the default back-off the
last one is an hour after the first."""

MAX_INT4 = 2**31 - 1
"""The largest value of the columns `fsm_version`, `attempt` and `max_attempts`."""

_MOST_DOUBLINGS: Final = 64
"""The exponent is capped before the power is computed: 2.0 ** 10_000 does not fit a float."""


def default_backoff(attempt: int, random: float) -> float:
    """Return the seconds to wait after the execution with this `attempt` (0, 1, 2, …) failed.

    The delay is `min(2 ** attempt, 300)`, of which the upper half is random: jobs that failed together (because
    a mail server is down, for example) must not be retried all at the same moment, and none at once.

    >>> default_backoff(0, random=1.0), default_backoff(3, random=0.0), default_backoff(10_000, random=1.0)
    (1.0, 4.0, 300.0)
    """
    base = min(2.0 ** min(max(attempt, 0), 9), CEILING)
    return base * (0.5 + 0.5 * random)


def _duration(value: Duration) -> float:
    return seconds(value, what="Backoff: initial= and maximum=", error=DefinitionError)


def _errors(on: object) -> tuple[type[Exception], ...]:
    value: Any = on
    given = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    if not given or not all(isinstance(each, type) and issubclass(each, Exception) for each in given):
        raise DefinitionError(f"Backoff: on= must be an exception class or a tuple of them, not {shown(on)}")
    return cast("tuple[type[Exception], ...]", given)


@attrs.frozen(kw_only=True)
class Backoff:
    """When a failed run is repeated: `@step(retry=Backoff(...))` of a machine, or `@job(backoff=Backoff(...))`.

    The delay after the run with this attempt (0, 1, 2, …) is `min(initial * factor ** attempt, maximum)` seconds.

    >>> Backoff(initial=1, factor=3, maximum=60, jitter=0).delay(2)
    9.0
    """

    max_attempts: int | None = None
    """How often the step runs at most, with the first run. None: 20; of a job, what its `max_attempts` says."""
    initial: Duration = attrs.field(default=1.0, converter=_duration)
    """Seconds before the second run."""
    factor: float = 2.0
    """The factor by which the delay grows with each further run; 1: always the same delay."""
    maximum: Duration = attrs.field(default=CEILING, converter=_duration)
    """The longest delay in seconds."""
    jitter: float = 0.5
    """The part of the delay that is random, 0 to 1, so that what failed together is not repeated together."""
    on: tuple[type[Exception], ...] | type[Exception] = attrs.field(default=Exception, converter=_errors)
    """The exceptions after which a run is repeated. After others `handle` decides at once, and a job fails."""

    def __attrs_post_init__(self) -> None:
        if self.max_attempts is not None:
            whole(
                self.max_attempts,
                what="Backoff: max_attempts=",
                error=DefinitionError,
                minimum=1,
                maximum=MAX_INT4,
            )
        for name, value, most in (("factor", self.factor, 1000.0), ("jitter", self.jitter, 1.0)):
            least = 1.0 if name == "factor" else 0.0
            number: object = value
            if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
                raise DefinitionError(
                    f"Backoff: {name}= must be a number from {least:g} to {most:g}; it is {shown(value)}"
                )

    @property
    def attempts(self) -> int:
        """How often a step runs at most."""
        return DEFAULT_MAX_ATTEMPTS if self.max_attempts is None else self.max_attempts

    def covers(self, error: object) -> bool:
        """Whether a run that failed like this is repeated. An exception group is, if all its members are.

        `error` may be a reason instead of an exception: a job has returned `Error(reason)`, which is always repeated.
        """
        on = cast("tuple[type[Exception], ...]", self.on)
        if not isinstance(error, BaseException) or isinstance(error, on):
            return True
        if not isinstance(error, BaseExceptionGroup):
            return False
        group = cast("BaseExceptionGroup[BaseException]", error)
        return group.split(on)[1] is None

    def delay(self, attempt: int, random: float = 1.0) -> float:
        """Return the seconds to wait after the run with this attempt failed; `random` is between 0 and 1."""
        initial, maximum = cast("float", self.initial), cast("float", self.maximum)
        power = float(self.factor) ** min(max(attempt, 0), _MOST_DOUBLINGS) if self.factor > 1 else 1.0
        return min(initial * power, maximum) * (1.0 - self.jitter + self.jitter * random)
