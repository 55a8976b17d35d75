from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest


@pytest.fixture
def conn(durable_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(durable_dsn, autocommit=True) as found:
        yield found
