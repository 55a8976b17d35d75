"""One Chromium per worker; the shop of the demo with its dashboard, in a process of its own, once per worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from durable_actors.testing.database import DatabaseServer
from tests.browser.tools import chromium, missing
from tests.kit import wait_until

collect_ignore_glob = ["test_*.py"] if missing() else []

ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture(scope="session")
def shop(durable_server: DatabaseServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard on a shop that stands still: nothing changes but by what a test does."""
    with durable_server.database() as dsn:
        log = tmp_path_factory.mktemp("shop") / "log"
        with log.open("w") as out:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.browser.shop", dsn], stdout=out, stderr=subprocess.STDOUT
            )
            try:
                wait_until(
                    lambda: "ready http" in log.read_text() or server.poll() is not None, "the shop is open"
                )
                assert server.poll() is None, log.read_text()
                yield log.read_text().split("ready ")[1].split()[0]
            finally:
                server.terminate()
                server.wait(20)


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Its API for asyncio is not used: the tests around these run on Trio.
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only where it is installed

    with sync_playwright() as play:
        profile = str(tmp_path_factory.mktemp("profile"))
        context = play.chromium.launch_persistent_context(
            profile, executable_path=chromium(), headless=True, args=ARGS
        )
        yield context
        context.close()


@pytest.fixture
def page(chrome: Any, shop: str) -> Iterator[Any]:
    """A new tab that reaches nothing but the shop. A message of its console that is an error fails the test."""
    tab = chrome.new_page()
    errors: list[str] = []
    tab.on(
        "console",
        lambda message: errors.append(message.text) if message.type in {"error", "warning"} else None,
    )
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.route("**/*", lambda r: r.continue_() if r.request.url.startswith(shop) else r.abort())
    tab.set_default_timeout(20_000)
    tab.set_viewport_size({"width": 1440, "height": 900})
    yield tab
    tab.close()
    assert not errors
