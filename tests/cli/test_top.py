"""What `top` draws: totals, rates per queue, and as many columns as fit."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from durable_actors._store.observe import NodeView
from durable_actors._store.pauses import QueuePause
from durable_actors._store.rates import NEWEST_ROWS, Recent
from durable_actors.cli.overview import QueueView
from durable_actors.cli.top import Picture, draw, head_line
from rich.console import Console
from tests.cli.conftest import Shell

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def queue(name: str, **fields) -> QueueView:
    plain = {"due": 12345, "scheduled": 7, "held": 1, "shelved": 2, "paused": 3, "asks": 4, "executing": 20}
    counted = {"awaiting": None, "done": None, "failed": None, "cancelled": None}
    return QueueView(queue=name, oldest_due=93.0, nodes=2, slots=20, **{**plain, **counted, **fields})


def node(name: str) -> NodeView:
    return NodeView(
        incarnation=name, node="n", started_at=NOW, seen_at=NOW, stopped_at=None,
        queues={"checkout": 20, "mail": 50, "reports-and-exports": 5}, machines=(), pid=4711, version="0.2.0",
        alive=True, claims=12,
    )  # fmt: skip


def picture(**fields) -> Picture:
    pause = QueuePause(queue="mail", machine=None, at=NOW, until=None, by="ada", reason="a flood of bounces")
    given = {
        "queues": [
            queue("checkout"),
            queue("mail", pauses=(pause,)),
            queue("a-very-long-name-of-a-queue-" * 3),
        ],
        "nodes": [node("worker-1.example.org:0123456789ab")],
        "recent": {"checkout": Recent(50, 12.34, 2), "mail": Recent(10, 0.5, 0)},
        "inserts": 17.2,
        "updates": 40.0,
        "signals": None,
    }
    return Picture(**{**given, **fields})


def drawn(what: Picture, width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, highlight=False)
    console.print(draw(what, "durable", keys=True, width=width))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 70, 80, 100, 240])
def test_it_holds_together(width: int):
    """No line is wider than the terminal, no number is cut, and every row of a table is one line."""
    lines = drawn(picture(), width)
    assert max(map(len, lines)) <= width
    at = next(n for n, line in enumerate(lines) if line.startswith("queue "))
    names = lines[at].split()
    assert names[:3] == ["queue", "due", "oldest"]
    for line in lines[at + 1 : at + 4]:
        assert "12345" in line, line
        assert "…" not in line.split("12345")[1]
    assert lines[at + 2].startswith("mail PAUSED")
    assert any(line.startswith("worker-1") for line in lines)
    assert (len(names) == 14) == (width == 240)


def test_at_seventy_columns_the_figures_that_matter_are_there():
    lines = drawn(picture(), 70)
    names = next(line for line in lines if line.startswith("queue ")).split()
    assert {"due", "oldest", "executing", "slots", "done/s", "failed"} <= set(names)
    assert any("12.3" in line for line in lines)


def test_the_totals():
    line = head_line(picture(), "durable")
    assert "done 12.8/s · failed 2 · oldest waiting 93 s · 1 queue paused · inserts 17/s" in line
    assert line.endswith("signals –/s")
    full = picture(recent={"q": Recent(NEWEST_ROWS, 900.0, 3)})
    assert "done ≥900.0/s · failed ≥3" in head_line(full, "durable")
    assert any("of the newest 10,000 instances" in line for line in drawn(full, 80))
    assert "oldest waiting none" in head_line(picture(queues=[]), "durable")


def test_what_it_reads(shell: Shell):
    for status in ("done", "done", "failed", "runnable"):
        shell.add(status=status, queue="mail")
    shell.add(status="done", queue="mail", finished_at="yesterday")
    found = shell.json("top")
    assert found["recent"] == {"mail": {"looked": 5, "done": 0.2, "failed": 1}}
    text = shell.ok("top")
    assert "done 0.2/s · failed 1" in text
