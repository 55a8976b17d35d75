"""What is not shown: values under telling names, under the names of `sensitive=`, and what the hook `redact=` hides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs

from durable_actors._store.commands import Receipt
from durable_actors._store.read import Instance
from durable_actors.dashboard_options import Dashboard
from durable_actors.journal.redaction import REDACTED, redact


class Redactor:
    """Hides values before a view returns them, so that pages and JSON hide the same."""

    def __init__(self, settings: Dashboard) -> None:
        self._names = frozenset(name.lower() for name in settings.sensitive)
        self._hook = settings.redact

    @property
    def has_hook(self) -> bool:
        """Whether texts may be hidden, too."""
        return self._hook is not None

    def shown(self, machine: str, what: str, value: Any) -> Any:
        """A JSON value as it may be shown. A hook that raises hides all of it."""
        if self._hook is not None:
            try:
                value = self._hook(machine, what, value)
            except Exception:  # noqa: BLE001 - user code; whatever it meant to hide stays hidden
                return REDACTED
        return self._without(value)

    def instance(self, row: Instance) -> Instance:
        """An instance as it may be shown, with all that a step, a caller or a person has put into it."""

        def shown(what: str, value: Any) -> Any:
            return self.shown(row.machine, what, value)

        boundary, decision = row.boundary, row.decision
        return attrs.evolve(
            row,
            state=shown("state", row.state),
            result=shown("result", row.result),
            last_error=shown("error", row.last_error),
            traceback=shown("error", row.traceback),
            meta=shown("meta", row.meta),
            boundary=None
            if boundary is None
            else attrs.evolve(boundary, data=shown("boundary", boundary.data)),
            decision=None
            if decision is None
            else attrs.evolve(decision, data=shown("decision", decision.data)),
        )

    def receipt(self, receipt: Receipt, machine: str = "") -> Receipt:
        """A receipt as it may be shown. Its reason is a sentence for others, and stays."""
        return attrs.evolve(
            receipt,
            data=self.shown(machine, "receipt", receipt.data),
            result=self.shown(machine, "receipt", receipt.result),
        )

    def _without(self, value: Any) -> Any:
        try:
            return self._inside(value)
        except RecursionError:
            return "(nested too deeply to be shown)"

    def _inside(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            known = redact(cast("Mapping[str, Any]", value))
            return {
                name: REDACTED
                if name.lower() in self._names or known[name] == REDACTED
                else self._inside(each)
                for name, each in cast("Mapping[str, Any]", value).items()
            }
        if isinstance(value, list | tuple):
            return [self._inside(each) for each in cast("list[Any]", value)]
        return value
