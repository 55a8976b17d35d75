"""Commits of a node that takes the next rows of the keys that they leave."""

from __future__ import annotations

from durable_actors._postgres.driver.connection import PgConn
from durable_actors._store.commit import Flushed, commit_outcomes
from durable_actors._store.rows import Transition
from durable_actors._store.siblings import Heir
from tests.store.kit import OWNER, SCHEMA, known_steps

TOKEN = "6b6f62c4-6a4b-4b6e-9d43-5f6f4b8f7d10"


def heir(*claim_ids: str, room: int = 10) -> Heir:
    """`OWNER`, which takes the next rows after these claims."""
    return Heir(OWNER, {"default": room}, frozenset(claim_ids), known_steps("m/1"), 0.0)


async def leave(conn: PgConn, *transitions: Transition, room: int = 10, token: str | None = None) -> Flushed:
    """Commit as a node that takes the next row of every key."""
    taking = heir(*(each.claim.claim_id for each in transitions), room=room)
    return await commit_outcomes(
        conn, SCHEMA, list(transitions), accept_late=True, token=token, heir=lambda _claims: taking
    )
