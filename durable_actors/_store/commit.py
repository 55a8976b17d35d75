"""Outcomes: many steps' transitions in one fenced statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from durable_actors._postgres import encode
from durable_actors._postgres.connection import PgConn
from durable_actors._store.claim import ClaimState, read_promoted
from durable_actors._store.rows import Committed, Promoted, Status, Transition
from durable_actors._store.sql import statement


async def commit_outcomes(
    conn: PgConn, schema: str, transitions: Sequence[Transition], *, accept_late: bool
) -> tuple[dict[int, Committed], list[Promoted]]:
    """Commit transitions of distinct instances: all of them, but for those whose claim is no longer current.

    Returns what was committed by id, and siblings of freed keys that are on offer now. One round trip and one
    transaction. Raises `CommitUnknown` when nobody knows: repeat the same call, then see `was_committed`.
    """
    claims = [each.claim for each in transitions]
    params = [
        encode.int_array([claim.id for claim in claims]),
        encode.text_array([claim.claim_id for claim in claims]),
        encode.int_array([claim.visit for claim in claims]),
        encode.text_array([claim.partition_key for claim in claims]),
        encode.text_array([each.status for each in transitions]),
        encode.bool_array([each.ahead for each in transitions]),
        encode.text_array([each.step for each in transitions]),
        encode.json_array([each.state for each in transitions]),
        encode.json_array([each.result for each in transitions]),
        encode.int_array([each.attempt for each in transitions]),
        encode.int_array([each.advance for each in transitions]),
        encode.float_array([each.delay for each in transitions]),
        encode.text_array([each.last_error for each in transitions]),
        encode.bool_array([each.rekey for each in transitions]),
        encode.text_array([each.partition_key for each in transitions]),
        b"t" if accept_late else b"f",
    ]
    commit = statement("commit_outcomes", schema)
    keys = sorted({claim.partition_key for claim in claims if claim.partition_key is not None})
    if not keys:
        rows, promoted = (await conn.run(commit, params)).rows, list[Promoted]()
    else:
        promote = statement("promote_siblings", schema)
        done, freed = await conn.batch([(commit, params), (promote, [encode.text_array(keys)])])
        rows, promoted = done.rows, read_promoted(freed.rows)
    committed = {
        int(row[0] or 0): Committed(int(row[1] or 0), cast("Status", (row[2] or b"").decode()), row[3])
        for row in rows
    }
    return committed, promoted


def was_committed(transition: Transition, now: ClaimState | None) -> Committed | None:
    """Tell from the row whether a commit of unknown fate, repeated in vain, had happened. Pure.

    Completion keeps the claim, reap and release clear it, and no claim id repeats: a row that still shows ours was
    touched by nobody else. It was committed when the visit advanced, or when it is no longer executing.
    """
    if now is None or now.claim_id != transition.claim.claim_id:
        return None
    if now.visit > transition.claim.visit or now.status != "executing":
        return Committed(now.visit, cast("Status", now.status), now.state)
    return None
