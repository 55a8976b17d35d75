from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from durable_actors.machine import isolated_registry


@pytest.fixture
def registry() -> Iterator[Any]:
    """What the test defines is forgotten afterwards, and nothing else is known."""
    with isolated_registry() as found:
        yield found


@pytest.fixture
def conn(durable_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(durable_dsn, autocommit=True) as found:
        yield found
