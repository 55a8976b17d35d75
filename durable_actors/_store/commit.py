"""Outcomes: the transitions of many steps in one fenced statement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, cast

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.decode import decode_int_array
from durable_actors._postgres.driver.statement import Params, Result, Statement
from durable_actors._store.arrays import none_for_all, one_for_all
from durable_actors._store.claim import ClaimRow, read_promoted
from durable_actors._store.commands import Request
from durable_actors._store.graph import Room, announcing, read_told, telling
from durable_actors._store.links import FEEDS
from durable_actors._store.rows import NULL, Claim, Committed, Promoted, Transition, rich_of
from durable_actors._store.siblings import Heir, freeing, read_freed
from durable_actors._store.sql import statement
from durable_actors.machine import FAILURES, Status

_BY_ID: Final = attrgetter("claim.id")


@attrs.frozen
class Flushed:
    """The result of a group commit."""

    committed: dict[int, Committed]
    """By instance id. A missing one was stale: nothing of it was written."""
    offered: list[Promoted]
    """Rows that are offered now: siblings of freed keys, parents whose barrier opened, dependents of what has ended."""
    handed: list[Claim]
    """Dependents of what has ended, and next rows of freed keys, that this node has claimed with the commit."""


async def commit_outcomes(
    conn: PgConn,
    schema: str,
    transitions: Sequence[Transition],
    *,
    accept_late: bool,
    node: str | None = None,
    token: str | None = None,
    known: Sequence[str] = (),
    room: Callable[[Iterable[str]], Room | None] = lambda _queues: None,
    heir: Callable[[Sequence[Claim]], Heir | None] = lambda _claims: None,
) -> Flushed:
    """Commit transitions of distinct instances, except those whose claim is no longer current.

    One round trip and one transaction: usually one statement, plus the riders. `node` is who ran the steps. `room` says
    how many dependents of what ends it takes at once, from the same queues; it is asked if there may be some. `heir`
    says of which claims with a key it takes the next row of the key. After `CommitUnknown`, repeat the same call, then
    see `was_committed`; there may be claims that no task knows: see `release_orphans`.

    `token`, a new uuid, names this call in `read_flushes`, for rows that it deletes; `known`: tokens of earlier calls.
    """
    # In id order, like signals lock their targets: otherwise a flush and a batch of signals could deadlock.
    transitions = sorted(transitions, key=_BY_ID)
    going = [each for each in transitions if each.deletes]
    staying = [each for each in transitions if not each.deletes] if going else transitions
    rich = rich_of(staying)
    late = b"t" if accept_late else b"f"
    calls = _writes(schema, staying, rich, late)
    if going:
        tokens = [encode.text(token), encode.uuid_array(known)]
        params = [*_going_params(going), late, *tokens]
        calls.append((statement("commit_deletes", schema, typed=True), params))
    writes = len(calls)
    ended = [each.claim for each in transitions if each.claim.parent_id is not None and each.ends]
    feeding = [claim for claim in ended if claim.recorded.links & FEEDS]
    taker = room({claim.queue for claim in feeding}) if feeding else None
    tells: Riders = telling(schema, [claim.id for claim in feeding], taker) if feeding else {}
    children: Riders = _of_children(schema, ended, tells) if ended else {}
    riders = _riders(schema, transitions, rich, node, children)
    keyed = [each for each in transitions if each.claim.partition_key is not None]
    taking = heir([each.claim for each in keyed]) if keyed else None
    riders |= _of_keys(schema, keyed, taking, token)
    before = [announcing(schema)] if feeding else []
    results = (
        (await conn.batch([*before, *calls, *riders.values()]))[len(before) :]
        if writes > 1 or riders
        else [await conn.run(*calls[0])]
    )
    written = cast("list[list[tuple[Any, ...]]]", [result.rows for result in results[:writes]])
    committed = {
        number: Committed(visit, status, state.encode(), inbox)
        if state is not None
        else _committed_without_state(visit, status, inbox)
        for rows in written
        for number, visit, status, state, inbox, _ in rows
    }
    return _read_riders(committed, dict(zip(riders, results[writes:], strict=True)), taker, taking)


def _writes(
    schema: str, staying: Sequence[Transition], rich: Sequence[Transition], late: bytes
) -> list[tuple[Statement, Params]]:
    """The statements that write the rows which are not deleted; `rich`: those with more to write than most."""
    apart = set(rich)
    plain = [each for each in staying if each not in apart] if rich else staying
    calls: list[tuple[Statement, Params]] = []
    if plain:
        calls.append((statement("commit_outcomes", schema, typed=True), [*_plain_params(plain), late]))
    if rich:
        params = [*_rich_params(rich), late, _boundaries(rich)]
        calls.append((statement("commit_parks", schema, typed=True), params))
    return calls


def _read_riders(
    committed: dict[int, Committed], results: Mapping[str, Result], taker: Room | None, taking: Heir | None
) -> Flushed:
    """What the riders of a commit have done. Pure."""
    offered: list[Promoted] = []
    handed: list[Claim] = []
    for name, result in results.items():
        if name in {"promote_siblings", "join_parents"}:
            offered.extend(read_promoted(result.rows))
        elif name == "tell_dependents":
            free, handed = read_told(cast("list[tuple[Any, ...]]", result.rows), taker)
            offered.extend(free)
        elif name == "hand_siblings" and taking is not None:
            free, next_ones = read_freed(cast("list[tuple[Any, ...]]", result.rows), taking)
            offered.extend(free)
            handed = [*handed, *next_ones]
        elif name == "recheck_awaits":
            for row in result.rows:
                woken = int(row[0] or 0)
                committed[woken] = attrs.evolve(committed[woken], status="runnable")
    return Flushed(committed, offered, handed)


Riders = Mapping[str, tuple[Statement, Params]]
"""Further statements of a transaction, in the order in which they must run."""


def _of_children(schema: str, ended: Sequence[Claim], tells: Riders) -> Riders:
    """What follows the end of children. Dependents are told before the parents: they are locked first."""
    ids = encode.int_array([claim.id for claim in ended])
    return {**tells, "join_parents": (statement("join_parents", schema), [ids])}


@functools.lru_cache(maxsize=256)  # few distinct values
def _committed_without_state(visit: int, status: Status, inbox: bool) -> Committed:  # noqa: FBT001 - a row
    """It no longer runs here."""
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


def _going_params(transitions: Sequence[Transition]) -> list[bytes]:
    claims = [each.claim for each in transitions]
    results = [None if each.result == NULL else each.result for each in transitions]
    return [
        encode.int_array([claim.id for claim in claims]),
        encode.uuid_array([claim.claim_id for claim in claims]),
        encode.int_array(one_for_all([claim.visit for claim in claims])),
        encode.json_array(none_for_all(results)),
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
    schema: str,
    transitions: Sequence[Transition],
    rich: Sequence[Transition],
    node: str | None,
    children: Riders,
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
    limited = [each for each in transitions if each.relimits]
    if limited:  # after the records of the outcomes, whose rows it moves once more
        riders["write_limits"] = (statement("write_limits", schema), limit_params(limited))
    consumed = [(each.claim.id, signal) for each in rich for signal in each.consumed]
    if consumed:
        riders["consume_signals"] = (statement("consume_signals", schema), pair_params(consumed))
    parked = [each for each in rich if each.status == "awaiting_signal" and each.boundary is None]
    if parked:
        kept = [signal for each in parked for signal in each.kept]
        params = [encode.int_array([each.claim.id for each in parked]), encode.int_array(kept)]
        riders["recheck_awaits"] = (statement("recheck_awaits", schema), params)
    riders.update(children)
    return riders


def _of_keys(schema: str, keyed: Sequence[Transition], taking: Heir | None, token: str | None) -> Riders:
    """What follows outcomes that may leave their keys: the last rider, if there are any."""
    if not keyed:
        return {}
    keys = sorted({cast("str", each.claim.partition_key) for each in keyed})
    if taking is not None:
        return {"hand_siblings": freeing(schema, keyed, keys, taking, token)}
    return {"promote_siblings": (statement("promote_siblings", schema), [encode.text_array(keys)])}


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


def limit_params(transitions: Sequence[Transition]) -> list[bytes]:
    """The parameters of write_limits.sql. Pure."""
    return [
        encode.int_array([each.claim.id for each in transitions]),
        encode.uuid_array([each.claim.claim_id for each in transitions]),
        encode.text_array([each.limits for each in transitions]),
    ]


def pair_params(pairs: Sequence[tuple[int, int]]) -> list[bytes]:
    """Pairs of target id and signal id as two array parameters."""
    return [
        encode.int_array([target for target, _ in pairs]),
        encode.int_array([signal for _, signal in pairs]),
    ]


async def read_flushes(conn: PgConn, schema: str, tokens: Sequence[str]) -> dict[str, frozenset[int]]:
    """The group commits with these tokens that were committed, each with the instances that it did not delete."""
    params = [encode.uuid_array(tokens)]
    rows = (await conn.run(statement("read_flushes", schema, read_only=True), params)).rows
    return {(row[0] or b"").decode(): frozenset(decode_int_array(row[1] or b"{}")) for row in rows}


async def forget_flushes(conn: PgConn, schema: str, *, after: float) -> None:
    """Delete what group commits left so many seconds ago or before."""
    await conn.run(statement("forget_flushes", schema), [encode.number(after)])


def was_committed(
    transition: Transition, now: ClaimRow | None, flushes: Iterable[frozenset[int]] = ()
) -> Committed | None:
    """Decide from the row whether a commit of unknown fate had happened. Pure.

    For a commit that was repeated and then wrote nothing.

    A commit keeps the claim id, reap and release clear it, and claim ids never repeat: a row that still has ours was
    not changed by anybody else. It was committed if the visit advanced or the row is no longer executing.

    A row that is gone tells nothing: whoever had the claim after us may have deleted it. `flushes` are the attempts at
    this transition that were committed, as `read_flushes` tells them: one of them has deleted it, or none of ours.
    """
    if now is None and transition.deletes:
        deleted = any(transition.claim.id not in kept for kept in flushes)
        return Committed(transition.claim.visit, "done") if deleted else None
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
