"""PgBouncer is a program of the system: where it is not installed there is nothing to collect."""

from __future__ import annotations

import durable_actors.machine
import pytest
from tests.chaos.pgbouncer import PROGRAM

collect_ignore_glob = [] if PROGRAM else ["test_*.py"]


@pytest.fixture
def registry():
    with durable_actors.machine.isolated_registry() as found:
        yield found
