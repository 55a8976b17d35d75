"""What holds for every test."""

from __future__ import annotations

import signal
import threading

import pytest
from durable_actors.machine import isolated_registry

pytest_plugins = ["durable_actors.testing.plugin"]

# A shell that starts the suite in the background has it ignore these, and so would every program that a test starts:
# nobody could interrupt them.
if threading.current_thread() is threading.main_thread():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def registry():
    """Machines that the test defines are forgotten afterwards, and it sees no others."""
    with isolated_registry() as found:
        yield found
