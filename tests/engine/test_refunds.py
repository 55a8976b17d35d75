"""Tokens of steps that never began are given back with their release: once, whatever becomes of the answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from durable_actors._engine.committing import releases
from durable_actors._store.claim import Released
from durable_actors._store.rows import RecordedClaim
from durable_actors.errors import CommitUnknown
from tests.engine.kit import claim


def limited(number: int) -> Any:
    found = claim(None, number)
    found.recorded = RecordedClaim(None, None, rate_limit="api", unstarted=True)
    return found


async def test_a_refund_whose_answer_is_lost_is_not_sent_again(monkeypatch: pytest.MonkeyPatch):
    """The releases are sent again, and with them that of a new claim of the same row (found by the simulation)."""
    sent: list[list[tuple[str, float]]] = []

    async def charge(conn: object, schema: str, charges: list[tuple[str, float]]) -> None:
        sent.append(charges)
        if len(sent) == 1:
            raise CommitUnknown("the connection was lost")

    monkeypatch.setattr(releases, "charge_limits", charge)
    node: Any = SimpleNamespace(owner=SimpleNamespace(schema="durable"))
    conn: Any = None
    first, second = limited(7), limited(7)
    released = Released(frozenset({7}), frozenset(), (), cascades=False)
    with pytest.raises(CommitUnknown):
        await releases.refund(node, conn, [first], released)
    await releases.refund(node, conn, [first, second], released)
    assert sent == [[("api", -1.0)], [("api", -1.0)]]
