"""13. The ceiling: a hand-written loop that only claims and completes batches over one raw connection.

No supervision, no leases to renew, no user code, no task per step, no decoding: what Postgres and libpq leave to win.
Its writes are fenced by the claim, and each batch is committed before the next one is claimed. Same table, same rows.
"""

from __future__ import annotations

from typing import cast

import attrs
import msgspec
from durable_actors import Done, Next
from durable_actors._postgres.driver.encode import json_array, text_array
from psycopg import pq
from psycopg.pq import ExecStatus

from bench.meter import Meter
from bench.workload import Count, Five

CLAIM = """
update durable.gen_durable g
   set status = 'executing', locked_by = 'ceiling', claim_id = gen_random_uuid(),
       lease_expires_at = now() + interval '60 s', updated_at = now()
 where g.id = any (array(
     select id from durable.gen_durable
      where status = 'runnable' and hold = 0 and queue = 'bench' and priority = 0 and eligible_at <= now()
      order by eligible_at, id limit $1::int for no key update skip locked))
returning g.id, g.claim_id, g.state"""

STEP = """
update durable.gen_durable g
   set step = o.step, state = o.state::jsonb, visit = g.visit + 1, updated_at = now()
  from unnest($1::bigint[], $2::uuid[], $3::text[], $4::text[]) o(id, claim, step, state)
 where g.id = o.id and g.claim_id = o.claim
returning g.id, g.claim_id, g.state"""

DONE = """
update durable.gen_durable g
   set status = 'done', result = o.result::jsonb, locked_by = null, lease_expires_at = null,
       finished_at = now(), updated_at = now()
  from unnest($1::bigint[], $2::uuid[], $3::text[]) o(id, claim, result)
 where g.id = o.id and g.claim_id = o.claim
returning g.id"""

SETUP = (
    "set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set enable_hashjoin = off;"
    " set enable_mergejoin = off; set jit = off"
)


class Loop:
    def __init__(self, dsn: str) -> None:
        self._conn = pq.PGconn.connect(dsn.encode())
        self._conn.exec_(SETUP.encode())
        self.claimed: pq.abc.PGresult
        for name, text in ((b"claim", CLAIM), (b"step", STEP), (b"done", DONE)):
            self._conn.prepare(name, text.encode())

    def _run(self, name: bytes, params: list[bytes]) -> pq.abc.PGresult:
        result = self._conn.exec_prepared(name, params)
        if result.status != ExecStatus.TUPLES_OK:
            raise RuntimeError(result.error_message.decode())
        return result

    def claim(self, batch: int) -> tuple[bytes, bytes, int]:
        result = self.claimed = self._run(b"claim", [b"%d" % batch])
        rows = range(result.ntuples)
        ids = b"{" + b",".join(result.get_value(row, 0) or b"" for row in rows) + b"}"
        claims = b"{" + b",".join(result.get_value(row, 1) or b"" for row in rows) + b"}"
        return ids, claims, result.ntuples

    def step(self, ids: bytes, claims: bytes, count: int, step: int) -> None:
        states = b"{" + b",".join([b'"{\\"n\\": %d}"' % step] * count) + b"}"
        steps = b"{" + b",".join([b"s%d" % step] * count) + b"}"
        self._run(b"step", [ids, claims, steps, states])

    def done(self, ids: bytes, claims: bytes, count: int) -> None:
        self._run(b"done", [ids, claims, b"{" + b",".join([b"null"] * count) + b"}"])

    def run_steps(self, machine: Five, ids: bytes, claims: bytes, count: int) -> None:
        """Run the real steps of a batch: each state is decoded, given to its step, encoded and committed."""
        result, column = self.claimed, 2
        for name in ("s0", "s1", "s2", "s3", "s4"):
            order = [result.get_value(row, 0) or b"" for row in range(count)]
            step, outcomes = getattr(machine, name), list[Next | Done]()
            for row in range(count):
                ctx = Bare(_decode(result.get_value(row, column) or b""))
                try:
                    step(ctx).send(None)
                except StopIteration as stop:
                    outcomes.append(stop.value)
            ids = b"{" + b",".join(order) + b"}"
            claims = b"{" + b",".join([result.get_value(row, 1) or b"" for row in range(count)]) + b"}"
            if name == "s4":
                results = json_array([_encode(cast("Done", each).result) for each in outcomes])
                self._run(b"done", [ids, claims, results])
                return
            states = json_array([_encode(cast("Next", each).state) for each in outcomes])
            steps = text_array([cast("Next", each).step for each in outcomes])
            result = self._run(b"step", [ids, claims, steps, states])


@attrs.define
class Bare:
    """As much of a context as the steps look at."""

    state: Count


_decode = msgspec.json.Decoder(Count).decode
_encode = msgspec.json.Encoder().encode


def run(
    meter: Meter, dsn: str, *, count: int, steps: int = 1, batch: int = 500, real: bool = False
) -> dict[str, float]:
    """Complete `count` instances of `steps` steps each; `real`: run the five steps, too. Figures per instance."""
    loop, machine = Loop(dsn), Five()
    loop.done(b"{}", b"{}", 0)
    meter.start()
    left = count
    while left:
        ids, claims, got = loop.claim(batch)
        if not got:
            raise RuntimeError(f"{left} rows are missing")
        if real:
            loop.run_steps(machine, ids, claims, got)
        else:
            for step in range(1, steps):
                loop.step(ids, claims, got, step)
            loop.done(ids, claims, got)
        left -= got
    return meter.stop(count)
