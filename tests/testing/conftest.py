from __future__ import annotations

from collections.abc import Iterator

import pytest
from durable_actors.machine import isolated_registry
from tests.testing import shop


@pytest.fixture(autouse=True)
def _only_the_shop() -> Iterator[None]:
    """A fresh bank, and a registry with the machines of the shop."""
    shop.bank.__init__()
    with isolated_registry() as registry:
        registry.register(shop.Checkout.__durable__)
        registry.register(shop.mail.__durable__)
        yield
