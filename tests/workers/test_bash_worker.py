from __future__ import annotations

from pathlib import Path

import pytest
from tests.workers.kit import check_worker
from tests.workers.tools import EXAMPLES


@pytest.mark.slow
@pytest.mark.usefixtures("registry")
async def test_a_worker_in_bash_runs_a_report(durable_dsn: str, tmp_path: Path) -> None:
    await check_worker(["bash", str(EXAMPLES / "worker.sh")], durable_dsn, "bash", tmp_path)
