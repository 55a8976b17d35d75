"""The part of `RowModel` that concerns what a row comes after, and limits: it waits, is unblocked or doomed, …"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
from durable_actors.journal import Record


def json(value: Any) -> Any:
    return msgspec.to_builtins(value)


class Upstreams:
    """Moves of a row that comes after others."""

    row: dict[str, Any]
    records: list[Record]
    now: datetime
    waits: bool

    def move(self, kind: str, change: dict[str, Any], **fields: Any) -> None:
        raise NotImplementedError

    def command(self, kind: str) -> dict[str, Any]:
        raise NotImplementedError

    def chance(self) -> bool:
        raise NotImplementedError

    def number(self, below: int) -> int:
        raise NotImplementedError

    def hold_it(self) -> None:
        raise NotImplementedError

    def shelve(self) -> None:
        raise NotImplementedError

    def unfit(self) -> None:
        raise NotImplementedError

    def waiting(self) -> list[Callable[[], None]]:
        """What may become of an offered row, beside a claim. Its limits are written by the commit of `Next`."""
        last = self.records[-1] if self.records else None
        written = last is not None and last.kind == "next" and last.rev == self.row["rev"]
        drops = [self.drop] * (self.row["cancellation"] is None)
        return [self.hold_it, self.shelve, self.throttle, self.unfit, *drops, *[self.relimit] * written]

    def throttle(self) -> None:
        by = f"api:{self.number(3)}"
        self.move("throttled", {"hold": 3, "limited_by": by}, data={"limited_by": by})

    def relimit(self) -> None:
        uses = f"api:{self.number(3)}"
        self.move("limited", {"rate_limit": uses}, data={"columns": {"rate_limit": uses}})

    def drop(self) -> None:
        told = {
            "limit": "api",
            "visit": self.row["visit"],
            "reason": "the limit api is full",
            "at": json(self.now),
        }
        self.move("dropped", {"hold": 0, "cancellation": told}, data={"columns": {"cancellation": told}})

    def revive(self) -> None:
        change: dict[str, Any] = {
            "status": "runnable", "hold": 0, "attempt": 0, "crashes": 0, "eligible_at": self.now, "finished_at": None,
            "claim_id": None, "claim_token_hash": None,
        }  # fmt: skip
        data = self.command("retry")
        if (self.row["cancellation"] or {}).keys() & {"upstream", "limit"}:
            change["cancellation"] = None
            data["columns"] = {"cancellation": None}
        if self.row.get("links"):
            self.waits = self.chance()
            if self.waits:
                change["hold"] = data["hold"] = 5
        self.move("revived", change, by="ann", data=data)

    def unblock(self) -> None:
        self.waits = False
        eligible = max(self.row["eligible_at"], self.now)
        self.move("unblocked", {"hold": 0, "eligible_at": eligible}, data={"eligible_at": eligible})

    def doom(self) -> None:
        """Also of a paused one, which stays paused."""
        self.waits = False
        told = {"upstream": 3, "reason": "upstream failed: a failed", "at": json(self.now)}
        change = {"hold": 0, "eligible_at": self.now, "cancellation": told}
        self.move("doomed", change, data={"eligible_at": self.now, "columns": {"cancellation": told}})
