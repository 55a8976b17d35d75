"""These tests run the release before: where git does not have it there is nothing to collect."""

from __future__ import annotations

import pytest
from tests.upgrade.old import OldRelease, extract, missing

collect_ignore_glob = ["test_*.py"] if missing() else []


@pytest.fixture(scope="session")
def old_release(tmp_path_factory: pytest.TempPathFactory) -> OldRelease:
    return extract(tmp_path_factory.mktemp("release-before"))
