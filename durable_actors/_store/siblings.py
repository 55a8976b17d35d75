"""Partition keys that are handed on: a commit that leaves a key claims the key's next row for the same node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._store.claim import Owner, read_pick, trusted_until
from durable_actors._store.rows import Claim, Promoted, Transition
from durable_actors._store.sql import statement


@attrs.frozen
class Heir:
    """A node that takes the next rows of keys that its own commit leaves."""

    owner: Owner
    queues: Mapping[str, int]
    """How many it takes of each queue."""
    claims: frozenset[str]
    """The claims (`claim_id`) whose keys it keeps; the others are only freed."""
    known: bytes
    """The steps that it knows (`encode.text_array`)."""
    now: float
    """The time on Trio's clock before the call: leases are trusted from there."""


def freeing(
    schema: str, transitions: Sequence[Transition], keys: Sequence[str], heir: Heir, token: str | None
) -> tuple[Statement, Params]:
    """The statement that hands keys on, or offers their next rows; `token` names the group of what is deleted."""
    from_ = [each for each in transitions if each.claim.claim_id in heir.claims]
    claims = [each.claim for each in from_]
    return statement("hand_siblings", schema, typed=True), [
        encode.text_array(keys),
        encode.int_array([claim.id for claim in claims]),
        encode.uuid_array([claim.claim_id for claim in claims]),
        encode.text_array([claim.partition_key for claim in claims]),
        encode.int_array([claim.priority for claim in claims]),
        encode.text_array([claim.queue for claim in claims]),
        encode.bool_array([each.deletes for each in from_]),
        None if token is None else token.encode(),
        heir.owner.name.encode(),
        encode.number(heir.owner.lease_ttl),
        encode.bytea(heir.owner.token_hash),
        encode.text_array([*heir.queues]),
        encode.int_array([*heir.queues.values()]),
        heir.known,
    ]


def read_freed(rows: list[tuple[Any, ...]], heir: Heir) -> tuple[list[Promoted], list[Claim]]:
    """Read the rows of hand_siblings.sql: what is on offer, and what is claimed, the most urgent first. Pure."""
    offered = [Promoted(row[1], row[0]) for row in rows if row[4] == "o"]
    by_queue: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        if row[4] == "c":
            by_queue.setdefault(row[0], []).append(row[1:])
    until = trusted_until(heir.now, heir.owner.lease_ttl)
    picked = [read_pick(found, queue=queue, trusted_until=until) for queue, found in by_queue.items()]
    return offered, [claim for each in picked for claim in each.claims]
