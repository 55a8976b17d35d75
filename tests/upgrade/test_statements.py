"""Every statement of the release before means something on the new schema."""

from __future__ import annotations

import re

import psycopg
from tests.upgrade.old import OldRelease

NOT_PREPARED = {"ensure_migrations", "uninstall"}
"""Commands that Postgres does not prepare; a node that works runs none of them."""


def test_every_statement_can_be_prepared(old_release: OldRelease, durable_dsn: str):
    """Tables, columns, functions and types that they name are there, under the same types."""
    refused: dict[str, str] = {}
    statements = old_release.sql()
    assert len(statements) > 40
    with psycopg.connect(durable_dsn, autocommit=True) as conn:
        for name, text in statements.items():
            if name in NOT_PREPARED:
                assert re.search(r"^(create|drop) ", text, re.MULTILINE)
                continue
            prepared = conn.pgconn.prepare(name.encode(), text.encode())
            if prepared.error_message:
                refused[name] = prepared.error_message.decode()
    assert not refused
