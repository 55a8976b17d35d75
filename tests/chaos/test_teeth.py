"""The breakages that chaos is tried on: each of them still breaks something that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos import teeth


@pytest.mark.parametrize("name", teeth.BREAKAGES)
def test_a_breakage_applies(name: str, tmp_path: Path):
    teeth.copy_broken(teeth.BREAKAGES[name], tmp_path)
