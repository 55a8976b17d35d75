"""Outcomes: the transitions of many steps in one fenced statement."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._store.arrays import none_for_all, one_for_all
from durable_actors._store.claim import ClaimRow, read_promoted
from durable_actors._store.commands import Request
from durable_actors._store.rows import Committed, Promoted, Transition
from durable_actors._store.sql import statement
from durable_actors.machine import FAILURES, Status

_BY_ID: Final = attrgetter("claim.id")


@attrs.frozen
class Flushed:
    """The result of a group commit."""

    committed: dict[int, Committed]
    """By instance id. A missing one was stale: nothing of it was written."""
    offered: list[Promoted]
    """Rows that are offered now: siblings of freed keys, parents whose barrier opened."""


async def commit_outcomes(
    conn: PgConn,
    schema: str,
    transitions: Sequence[Transition],
    *,
    accept_late: bool,
    node: str | None = None,
) -> Flushed:
    """Commit transitions of distinct instances, except those whose claim is no longer current.

    One round trip and one transaction: usually one statement, plus the riders. `node` is who ran the steps. After
    `CommitUnknown`, repeat the same call, then see `was_committed`.
    """
    late = b"t" if accept_late else b"f"
    # In id order, like signals lock their targets: otherwise a flush and a batch of signals could deadlock.
    transitions = sorted(transitions, key=_BY_ID)
    rich = [each for each in transitions if not each.plain]
    plain = [each for each in transitions if each.plain] if rich else transitions
    calls: list[tuple[Statement, Params]] = []
    if plain:
        calls.append((statement("commit_outcomes", schema, typed=True), [*_plain_params(plain), late]))
    if rich:
        calls.append(
            (statement("commit_parks", schema, typed=True), [*_rich_params(rich), late, _boundaries(rich)])
        )
    writes = len(calls)
    riders = _riders(schema, transitions, rich, node)
    results = (
        await conn.batch([*calls, *riders.values()]) if writes > 1 or riders else [await conn.run(*calls[0])]
    )
    written = cast("list[list[tuple[Any, ...]]]", [result.rows for result in results[:writes]])
    committed = {row[0]: _committed(*row[1:5]) for rows in written for row in rows}
    offered: list[Promoted] = []
    for name, result in zip(riders, results[writes:], strict=True):
        if name in {"promote_siblings", "join_parents"}:
            offered.extend(read_promoted(result.rows))
        elif name == "recheck_awaits":
            for row in result.rows:
                woken = int(row[0] or 0)
                committed[woken] = attrs.evolve(committed[woken], status="runnable")
    return Flushed(committed, offered)


def _committed(visit: int, status: Status, state: str | None, inbox: bool) -> Committed:  # noqa: FBT001 - a row
    if state is None:  # it no longer runs here: few distinct values, so they are cached
        return _committed_without_state(visit, status, inbox)
    return Committed(visit, status, state.encode(), inbox)


@functools.lru_cache(maxsize=256)
def _committed_without_state(visit: int, status: Status, inbox: bool) -> Committed:  # noqa: FBT001 - a row
    return Committed(visit, status, None, inbox)


def _plain_params(transitions: Sequence[Transition]) -> list[bytes]:
    claims = [each.claim for each in transitions]
    return [
        encode.int_array([claim.id for claim in claims]),
        encode.uuid_array([claim.claim_id for claim in claims]),
        encode.int_array(one_for_all([claim.visit for claim in claims])),
        encode.text_array(none_for_all([claim.partition_key for claim in claims])),
        encode.text_array(one_for_all([each.status for each in transitions])),
        encode.bool_array(one_for_all([each.keep_claim for each in transitions])),
        encode.text_array(one_for_all([each.step for each in transitions])),
        encode.json_array(none_for_all([each.state for each in transitions])),
        encode.json_array(none_for_all([each.result for each in transitions])),
        encode.int_array(one_for_all([each.attempt for each in transitions])),
        encode.int_array(one_for_all([each.advance for each in transitions])),
        encode.float_array(one_for_all([each.delay for each in transitions])),
        encode.text_array(none_for_all([each.last_error for each in transitions])),
        encode.bool_array(none_for_all([each.rekey or None for each in transitions])),
        encode.text_array(none_for_all([each.partition_key for each in transitions])),
    ]


def _rich_params(transitions: Sequence[Transition]) -> list[bytes]:
    claims = [each.claim for each in transitions]
    raised = [each.raised for each in transitions]
    return [
        encode.int_array([claim.id for claim in claims]),
        encode.uuid_array([claim.claim_id for claim in claims]),
        encode.int_array([claim.visit for claim in claims]),
        encode.text_array([each.status for each in transitions]),
        encode.text_array([each.step for each in transitions]),
        encode.json_array([each.state for each in transitions]),
        encode.json_array([each.result for each in transitions]),
        encode.int_array([each.attempt for each in transitions]),
        encode.int_array([each.advance for each in transitions]),
        encode.float_array([each.delay for each in transitions]),
        encode.text_array([each.last_error for each in transitions]),
        encode.bool_array([each.rekey for each in transitions]),
        encode.text_array([each.partition_key for each in transitions]),
        encode.text_array(
            [None if each.awaits is None else encode.text_array(each.awaits).decode() for each in transitions]
        ),
        encode.bool_array([each.keeps_awaits for each in transitions]),
        encode.text_array([each.await_step for each in transitions]),
        encode.float_array([each.timeout for each in transitions]),
        encode.text_array(none_for_all([None if each is None else each.type for each in raised])),
        encode.text_array(none_for_all([None if each is None else each.traceback for each in raised])),
    ]


def _boundaries(transitions: Sequence[Transition]) -> bytes:
    return encode.json_array(none_for_all([each.boundary for each in transitions]))


def _riders(
    schema: str, transitions: Sequence[Transition], rich: Sequence[Transition], node: str | None
) -> dict[str, tuple[Statement, Params]]:
    """Further statements of the same transaction, in the order in which they must run."""
    riders: dict[str, tuple[Statement, Params]] = {}
    # Asked in place for what most jobs are, 40 instead of 110 ns.
    journaled = [
        each
        for each in transitions
        if (level := each.claim.journal) and (level > FAILURES or each.status != "done") and each.journaled
    ]
    if journaled:  # before the recheck, which moves a row once more
        riders["journal_outcomes"] = (statement("journal_outcomes", schema), _journal_params(journaled, node))
    consumed = [(each.claim.id, signal) for each in rich for signal in each.consumed]
    if consumed:
        riders["consume_signals"] = (statement("consume_signals", schema), pair_params(consumed))
    parked = [each for each in rich if each.status == "awaiting_signal" and each.boundary is None]
    if parked:
        kept = [signal for each in parked for signal in each.kept]
        params = [encode.int_array([each.claim.id for each in parked]), encode.int_array(kept)]
        riders["recheck_awaits"] = (statement("recheck_awaits", schema), params)
    children = [each.claim.id for each in transitions if each.claim.parent_id is not None and each.ends]
    if children:
        riders["join_parents"] = (statement("join_parents", schema), [encode.int_array(children)])
    keys = sorted({each.claim.partition_key for each in transitions if each.claim.partition_key is not None})
    if keys:
        riders["promote_siblings"] = (statement("promote_siblings", schema), [encode.text_array(keys)])
    gone = [each.claim.id for each in transitions if each.deletes]
    if gone:  # the last one: the others read these rows
        riders["delete_done"] = (statement("delete_done", schema), [encode.int_array(gone)])
    return riders


def _journal_params(transitions: Sequence[Transition], node: str | None) -> Params:
    claims = [each.claim for each in transitions]
    recorded = [claim.recorded for claim in claims]
    return [
        encode.int_array([claim.id for claim in claims]),
        encode.uuid_array([claim.claim_id for claim in claims]),
        encode.text_array(one_for_all([each.kind for each in transitions])),
        encode.text_array(one_for_all([claim.step for claim in claims])),
        encode.int_array(one_for_all([claim.visit for claim in claims])),
        encode.int_array(one_for_all([claim.attempt for claim in claims])),
        encode.float_array(none_for_all([each.seconds for each in transitions])),
        encode.text(node),
        encode.int_array(one_for_all([claim.round for claim in claims])),
        encode.text_array(none_for_all([each.lease_until for each in recorded])),
        encode.bool_array(none_for_all([each.rekey or None for each in transitions])),
        encode.json_array(none_for_all([each.handled for each in transitions])),
        encode.text_array(none_for_all([each.definition for each in recorded])),
    ]


def pair_params(pairs: Sequence[tuple[int, int]]) -> list[bytes]:
    """Pairs of target id and signal id as two array parameters."""
    return [
        encode.int_array([target for target, _ in pairs]),
        encode.int_array([signal for _, signal in pairs]),
    ]


def was_committed(transition: Transition, now: ClaimRow | None) -> Committed | None:
    """Decide from the row whether a commit of unknown fate had happened. Pure.

    For a commit that was repeated and then wrote nothing.

    A commit keeps the claim id, reap and release clear it, and claim ids never repeat: a row that still has ours was
    not changed by anybody else. It was committed if the visit advanced or the row is no longer executing.
    """
    if now is None or now.claim_id != transition.claim.claim_id:
        return None
    if now.visit > transition.claim.visit or now.status != "executing":
        return Committed(now.visit, cast("Status", now.status), now.state)
    return None


def overruled_by(transition: Transition, now: ClaimRow | None) -> Request | None:
    """The request to cancel because of which the fence has refused this outcome; None: it was stale. Pure."""
    claim = transition.claim
    if now is None or now.request is None or transition.outlasts_request:
        return None
    ours = now.status == "executing" and (now.claim_id, now.visit) == (claim.claim_id, claim.visit)
    return now.request if ours and now.request.cancels else None
