"""A wrong wall clock for one process: what `time.time` and `datetime.now` tell; the monotonic clock stays right."""

from __future__ import annotations

import datetime as dt
import sys
import time
from typing import Any

_Datetime = dt.datetime
_time, _time_ns = time.time, time.time_ns


class _Kind(type):
    """Lets every datetime be an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Datetime)


def skew(seconds: float) -> None:
    """Put this process's clock forward, also for modules that have imported it already."""

    class Skewed(_Datetime, metaclass=_Kind):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return _Datetime.now(tz) + dt.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            return _Datetime.now(dt.UTC).replace(tzinfo=None) + dt.timedelta(seconds=seconds)

    new = {
        _Datetime: Skewed,
        _time: lambda: _time() + seconds,
        _time_ns: lambda: _time_ns() + int(seconds * 1e9),
    }
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if module.__name__ != __name__ and isinstance(value, type | type(_time)) and value in new:
                setattr(module, name, new[value])
