"""Every example runs as a user runs it, and does what its first lines say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
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
