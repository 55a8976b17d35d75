from __future__ import annotations

import pytest
from tests.otp.kit import Kit


@pytest.fixture
def kit() -> Kit:
    return Kit()
