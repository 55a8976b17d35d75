import pytest
from durable_actors.machine import isolated_registry


@pytest.fixture(autouse=True)
def registry():
    """What a test defines is forgotten afterwards."""
    with isolated_registry() as registry:
        yield registry
