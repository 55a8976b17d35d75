"""Logs for programs: one JSON object per line, with the step and the trace that a record belongs to.

::

    da.logs.configure(json=True)          # what `durable-actors serve --log-format json` does

The loggers are those of the standard library, below `durable_actors`; use `JsonFormatter` in a configuration of your
own. A line has `time`, `level`, `logger` and `message`; in a step `instance`, `machine`, `step` and `attempt`; in a
trace (`durable_actors.otel`) `trace_id` and `span_id`; after an error `error` and `traceback`; and what you have
passed as `extra=`.
"""

from __future__ import annotations

import json as jsons
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from durable_actors import _tracing
from durable_actors._step_log import StepLogFilter, current_step
from durable_actors.errors import ConfigError

__all__ = ["JsonFormatter", "configure"]

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
STEP: Final = ("instance", "machine", "step", "attempt")
_STANDARD: Final = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", *STEP}  # taskName: Python 3.12
)


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON. `process` is the name of the process, if it has one."""

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. What JSON cannot represent becomes text."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process is not None:
            line["process"] = self._process
        line |= _of_step(record)
        tracer = _tracing.tracer()
        ids = None if tracer is None else tracer.current()
        if ids is not None:
            line["trace_id"], line["span_id"] = ids
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = f"{type(error).__name__}: {error}"
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in line:
                line[name] = value
        return jsons.dumps(line, ensure_ascii=False, default=_text, skipkeys=True)


def _of_step(record: logging.LogRecord) -> dict[str, Any]:
    """The step of a record: as `StepLogFilter` has found it, or of the code that formats it."""
    running = current_step.get()
    if running is None or hasattr(record, "instance"):
        found = {name: getattr(record, name, None) for name in STEP}
    else:
        found = {
            "instance": running.id,
            "machine": running.machine,
            "step": running.step,
            "attempt": running.attempt,
        }
    return {name: value for name, value in found.items() if value is not None}


def _text(value: object) -> str:
    """What JSON does not know, as text. A user's object may raise."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a log line must not fail
        return f"<{type(value).__name__}>"


def configure(
    *,
    json: bool = False,
    level: int | str = "INFO",
    stream: TextIO | None = None,
    name: str | None = None,
) -> None:
    """Let the root logger write to standard error (or `stream`): as text, or one JSON object per line.

    `name` tells the processes apart that write to the same place. Replaces the handlers that the root logger has: call
    it once, where your program starts.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.addFilter(StepLogFilter())
    text = TEXT if name is None else TEXT.replace(" %(name)s", f" [{name.replace('%', '%%')}] %(name)s")
    handler.setFormatter(JsonFormatter(name) if json else logging.Formatter(text))
    try:
        logging.basicConfig(
            level=level.upper() if isinstance(level, str) else level, handlers=[handler], force=True
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"level={level!r} is no level of logging: {error}", option="level", value=level
        ) from None
