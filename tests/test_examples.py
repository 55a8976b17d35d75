"""Every example runs as a user runs it, and does what its first lines say."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from durable_actors.testing import Bench, crash_anywhere
from tests.warm import warm

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
    "fan_out": ["{'pages': 3, 'words': 9, 'unreadable': ['ValueError: this page cannot be read']}"],
}
# What those that fail by design have the engine log; the others log nothing.
LOGS = {"fan_out": "ValueError: this page cannot be read", "retries": "CardRefusedError: the card is blocked"}
ELSEWHERE = {"otp_chat"}  # tests/otp/test_examples_otp.py


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SAYS.keys() | ELSEWHERE


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SAYS)
def test_an_example(name: str, empty_dsn: str, tmp_path: Path):
    environ = {**os.environ, "DURABLE_DSN": empty_dsn}
    code, out, err = warm().run(EXAMPLES / f"{name}.py", cwd=tmp_path, env=environ, timeout=110)
    assert code == 0, out + err
    assert LOGS[name] in err if name in LOGS else not err
    for text in SAYS[name]:
        assert text in out


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
