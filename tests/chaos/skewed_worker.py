"""A worker whose wall clock is wrong, by `CHAOS_CLOCK` seconds: the first to be imported patches the rest.

What a process on such a machine would see is what `time.time` and `datetime.now` tell; the monotonic clock is right.
"""

from __future__ import annotations

import datetime as dt
import os
import runpy
import time

OFF = float(os.environ["CHAOS_CLOCK"])
_time, _time_ns, _Datetime = time.time, time.time_ns, dt.datetime


class _Kind(type(_Datetime)):  # type: ignore[misc] - the metaclass of a C class
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Datetime)


class SkewedDatetime(_Datetime, metaclass=_Kind):
    """`datetime` with a wrong `now`."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:
        return _Datetime.now(tz) + dt.timedelta(seconds=OFF)

    @classmethod
    def utcnow(cls) -> dt.datetime:
        return _Datetime.now(dt.UTC).replace(tzinfo=None) + dt.timedelta(seconds=OFF)


def main() -> None:
    """Become the worker."""
    time.time = lambda: _time() + OFF
    time.time_ns = lambda: _time_ns() + int(OFF * 1e9)
    dt.datetime = SkewedDatetime  # type: ignore[misc]
    runpy.run_module("tests.chaos.worker", run_name="__main__")


if __name__ == "__main__":
    main()
