from __future__ import annotations

from pathlib import Path

import pytest
from tests.workers.kit import check_worker
from tests.workers.tools import EXAMPLES


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
async def test_a_worker_in_node_runs_a_report(durable_dsn: str, tmp_path: Path) -> None:
    await check_worker(["node", str(EXAMPLES / "worker.js")], durable_dsn, "node", tmp_path)
