from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.observe.kit import Sdk, sdk


@pytest.fixture
def otel_sdk() -> Iterator[Sdk]:
    with sdk() as found:
        yield found
