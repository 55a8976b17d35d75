import pytest


@pytest.fixture(autouse=True)
def _isolated(registry):
    """Every test here defines machines."""
