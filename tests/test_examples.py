"""Every example runs as a user runs it, and does what its first lines say."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from durable_actors.testing import Bench, crash_anywhere
from tests.warm import warm

pytestmark = pytest.mark.slow  # whole programs

EXAMPLES = Path(__file__).parent.parent / "examples"

# What each prints, in any order.
SAYS = {
    "embedded_in_trio": ["→ {'thumbnail': 'cat.small'}", "the app went on meanwhile: yes"],
    "django_style": ["order 1 placed", "order 3: out of stock", "→ {'shipped': 1}", "→ {'shipped': 2}"],
    "asyncio_handler": ["201 Created ada@example.org → {'sent_to': 'ada@example.org'}"],
    "fan_of_jobs": ["1000 jobs inserted", "their sum is 332833500, expected 332833500"],
    "retries": [
        "good: attempt 1 of step pay: BankDownError('no answer')",
        "good → {'cents': 1200, 'receipt': 'receipt-1'} (payments made: 1)",
        "stolen → CardRefusedError: the card is blocked",
    ],
    "webhooks": ["7 deliveries of 3 events → {'cents': 600, 'events': 3}"],
    "approval": [
        "ada → approved: a small sum",
        "eve → approved by the boss",
        "kay → rejected by the boss",
        "lea → escalated: nobody answered in time",
    ],
    "packs": [
        "a pack of 5 → p1 p2 p3 p4 p5",
        "a pack of 5 → p6 p7 p8 p9 p10",
        "a pack of 2 → p11 p12",
    ],
    "report_graph": [
        "the report failed: task margin (instance 6) failed: KeyError: 'eur' (2 tasks after it did not run)",
        "6 tasks ran: charts, costs, margin, orders, refunds, revenue",
        "2026-10: margin 25%",
        "3 tasks ran: document, mail, margin",
    ],
    "nightly": [
        "slots during the pause: paused",
        "a burst after it: no",
        "run now → the report",
        "each slot ran once: yes",
    ],
    "api_limit": ["10 calls were made", "more than two in a fifth of a second: no"],
    "fan_out": ["{'pages': 3, 'words': 9, 'unreadable': ['ValueError: this page cannot be read']}"],
}
WEB = {
    "django_orders": [
        "order 3: out of stock",
        "orders: [1, 2]",
        "instance 1 → {'shipped': 1}",
        "instance 2 → {'shipped': 2}",
        "instances: 2",
    ],
    "flask_orders": ["answers: [201, 422]", "instance 1 → welcome, ada@example.org", "instances: 1"],
    "fastapi_orders": ["created: 201 paid: [200, 404]", "instance 1 → {'cents': 4200, 'shipped': 7}"],
}
# What those that fail by design have the engine log; the others log nothing.
LOGS = {
    "fan_out": "ValueError: this page cannot be read",
    "retries": "CardRefusedError: the card is blocked",
    "report_graph": "KeyError: 'eur'",
}
ELSEWHERE = {"otp_chat"}  # tests/otp/test_examples_otp.py


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAYS.keys() | ELSEWHERE
    assert {path.stem for path in EXAMPLES.glob("web/*.py")} == WEB.keys()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SAYS)
def test_an_example(name: str, empty_dsn: str, tmp_path: Path):
    out, err = run(EXAMPLES / f"{name}.py", empty_dsn, tmp_path)
    assert LOGS[name] in err if name in LOGS else not err
    for text in SAYS[name]:
        assert text in out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", WEB)
def test_an_example_of_a_web_framework(name: str, empty_dsn: str, tmp_path: Path):
    out, err = run(EXAMPLES / "web" / f"{name}.py", empty_dsn, tmp_path)
    assert not err
    for text in WEB[name]:
        assert text in out


def run(path: Path, dsn: str, cwd: Path) -> tuple[str, str]:
    """Run it to its end; return what it printed, and its errors."""
    code, out, err = warm().run(path, cwd=cwd, env={**os.environ, "DURABLE_DSN": dsn}, timeout=110)
    assert code == 0, out + err
    return out, err


# -- their machines, on a bench


def load(name: str) -> Any:
    """The example as a module; its machines are in the current registry."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("registry")
async def test_an_approval_is_answered_or_escalated(durable: Bench) -> None:
    example = load("approval")
    small, yes, late = [
        await durable.insert(example.Approval, state=example.Expense(who, cents))
        for who, cents in (("ada", 999), ("eve", 5000), ("lea", 5000))
    ]
    await durable.drain()
    await durable.assert_done(small, "approved: a small sum")
    await durable.assert_waiting(yes, signal="approve", step="decide")
    await durable.signal(yes, "approve", {"by": "the boss"})
    await durable.drain()
    await durable.assert_done(yes, "approved by the boss")
    await durable.advance(example.PATIENCE)
    await durable.drain()
    await durable.assert_done(late, "escalated: nobody answered in time")
    run = await durable.run_step(
        example.Approval.decide, example.Expense("kay", 1), signals=[("reject", {"by": "me"})]
    )
    assert run.result == "rejected by me"


@pytest.mark.usefixtures("registry")
async def test_a_webhook_counts_once_wherever_a_worker_dies(durable: Bench) -> None:
    example = load("webhooks")

    async def deliveries(durable: Bench) -> Any:
        for n in (1, 2, 1, 3, 2):
            number = await example.webhook(
                {"id": f"evt-{n}", "account": "a", "type": "payment", "cents": 100 * n}
            )
            await durable.drain()
        await example.webhook({"id": "evt-close", "account": "a", "type": "close"})
        await durable.drain()
        return await durable.result(number)

    points = await crash_anywhere(durable, deliveries)
    assert len(points) == 2 * 5  # the start, three payments, the end


@pytest.mark.usefixtures("registry")
async def test_a_payment_is_made_once_wherever_a_worker_dies(durable: Bench) -> None:
    example = load("retries")

    async def pay(durable: Bench) -> Any:
        example.PAID.clear()
        good = await durable.insert(example.Charge, state=example.Payment("good", 1200))
        stolen = await durable.insert(example.Charge, state=example.Payment("stolen", 99))
        for _ in range(4):
            await durable.drain()
            await durable.advance("10s")
        await durable.assert_failed(stolen, example.CardRefusedError)
        return len(example.PAID), await durable.result(good)

    await crash_anywhere(durable, pay)


@pytest.mark.usefixtures("registry")
async def test_packs_are_shipped_when_full_or_quiet(durable: Bench) -> None:
    example = load("packs")
    depot = await durable.insert(example.Depot)
    for n in range(1, 8):
        await durable.signal(depot, "parcel", f"p{n}")
    await durable.drain()
    await durable.assert_waiting(depot, signal="parcel")
    await durable.advance(example.QUIET)
    await durable.drain()
    await durable.assert_done(depot, [["p1", "p2", "p3", "p4", "p5"], ["p6", "p7"]])


@pytest.mark.usefixtures("registry")
async def test_a_book_is_counted_without_its_bad_page(durable: Bench) -> None:
    example = load("fan_out")
    book = await durable.insert(example.CountBook, state=example.Book(["a b", "\ufffd", "c"]))
    drained = await durable.drain()
    assert drained.steps.count("perform") == 3
    await durable.assert_waiting(book, step="add_up")
    await durable.advance("1m")
    await durable.drain()
    await durable.assert_done(
        book, {"pages": 2, "words": 3, "unreadable": ["ValueError: this page cannot be read"]}
    )


@pytest.mark.usefixtures("registry")
async def test_a_report_is_mended_and_run_again_from_there(durable: Bench) -> None:
    example = load("report_graph")
    report = await durable.insert(example.Report, state=example.Month(2026, 10))
    await durable.drain()
    await durable.assert_failed(report, "task margin")
    example.RATES["eur"] = 1.25
    example.RUNS.clear()
    again = await durable.rerun(report, step="margin")
    await durable.drain()
    assert example.RUNS == ["margin", "document", "mail"]
    assert (await durable.result(again)).startswith("2026-10: margin 40%")
    alone = await durable.run_step(
        example.Report.document,
        example.Month(2026, 9),
        dependencies={"charts": ["berlin"], "margin": 0.5},
    )
    assert alone.result == "2026-09: margin 50%\nberlin"
