"""The laws of the store that the walks of test_faithful.py check in Postgres, whatever the model says."""

from __future__ import annotations

from typing import Any


class Laws:
    """Mixed into `Pair`."""

    db: Any
    kept: dict[int, tuple[int, ...]]
    finals: dict[int, Any]
    said: list[str]

    def no_wake_up_is_lost(self) -> None:
        """A matching unread signal of a parked instance is one that its park was to ignore."""
        unread = self.db.execute(
            "select s.target_id, s.id from durable.signals s join durable.gen_durable g on g.id = s.target_id"
            " where g.status = 'awaiting_signal' and s.name = any (g.awaits) and s.consumed_at is null"
        ).fetchall()
        for target, number in unread:
            assert number in self.kept[target], self.said[-5:]

    def barriers_wait_for_living_children(self) -> None:
        barriers = self.db.execute(
            "select p.children_total, p.children_pending, count(c.id),"
            " count(c.id) filter (where c.finished_at is null)"
            " from durable.gen_durable p left join durable.gen_durable c on c.parent_id = p.id and c.barrier = p.visit"
            " where p.status = 'awaiting_children' group by p.id"
        ).fetchall()
        for total, pending, count, alive in barriers:
            assert count == total, self.said[-5:]
            assert 0 < pending <= alive, self.said[-5:]

    def what_has_ended_stays_as_it_is(self) -> None:
        query = "select id, g::text from durable.gen_durable g where finished_at is not null"
        now = dict(self.db.execute(query).fetchall())
        assert {number: now.get(number) for number in self.finals} == self.finals, self.said[-5:]
        self.finals = now
