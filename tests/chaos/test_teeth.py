"""The breakages that chaos is tried on: each of them still breaks something that is there."""

from __future__ import annotations

import pytest
from tests.chaos import teeth


@pytest.mark.parametrize("name", teeth.BREAKAGES)
def test_a_breakage_applies(name: str):
    assert teeth.broken_texts(teeth.BREAKAGES[name])
