"""`demo`: a worker dies, every order is there, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys

import attrs
import pytest
from durable_actors.cli.demo_accounts import Order, audit
from tests.cli.demo_kit import assert_nothing_is_left, start_demo
from tests.store.test_why import instance

ORDERS = [Order(1, 100), Order(2, 250)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo(empty_dsn: str):
    process = start_demo(empty_dsn, "--orders", "30")
    out, err = process.communicate(timeout=110)
    assert (process.returncode, err) == (0, ""), out
    for text in (
        "two processes of `durable-actors serve` share the work: worker-1 (pid ",
        "30 orders placed",
        "kill -9 worker-1: it was working on orders ",
        "recovered after ",
        "30 of 30 orders done, 0 lost; 0 committed a step twice",
        "placed 62.55 €, booked 62.55 €, paid 62.55 €",
        "30 of 30 orders got exactly one mail",
        "drained and ended with exit code 0",
    ):
        assert text in out
    assert_nothing_is_left(empty_dsn)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_demo_for_programs(empty_dsn: str):
    process = start_demo(empty_dsn, "--orders", "20", "--json")
    out, err = process.communicate(timeout=110)
    assert (process.returncode, err) == (0, ""), out
    found = json.loads(out)
    assert found["right"] is True
    assert (found["orders"], found["done"], found["lost"], found["twice"]) == (20, 20, 0, 0)
    assert found["asked"] >= found["payments"] == 20


@attrs.frozen
class Case:
    orders: list
    mails: list
    payments: list
    right: bool


def order(number: int, cents: int, **changes: object):
    return instance(
        id=number,
        status="done",
        visit=4,
        state={"number": number},
        result={"cents": cents},
        **changes,
    )


def mail(number: int):
    return instance(id=100 + number, status="done", state={"number": number})


GOOD = [order(1, 100), order(2, 250)]
MAILS = [mail(1), mail(2)]
PAID = [(1, 100, 1), (2, 250, 3)]
CASES = {
    "right": Case(GOOD, MAILS, PAID, True),
    "an order is lost": Case(GOOD[:1], MAILS, PAID, False),
    "an order failed": Case([GOOD[0], attrs.evolve(GOOD[1], status="failed")], MAILS, PAID, False),
    "a step was committed twice": Case([GOOD[0], attrs.evolve(GOOD[1], visit=5)], MAILS, PAID, False),
    "two mails": Case(GOOD, [*MAILS, mail(2)], PAID, False),
    "no mail": Case(GOOD, MAILS[:1], PAID, False),
    "paid twice": Case(GOOD, MAILS, [*PAID, (2, 250, 1)], False),
    "paid the wrong sum": Case(GOOD, MAILS, [PAID[0], (2, 251, 1)], False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_audit_finds_it(name: str):
    case = CASES[name]
    found = audit(
        *(ORDERS, case.orders, case.mails, case.payments), recovered=[1], recovery_seconds=1.0, seconds=2.0
    )
    assert found.right is case.right


def test_the_demos_machines_are_nobody_elses():
    """They would be served by every worker, had `serve` imported them."""
    code = "import durable_actors.cli, durable_actors.machine as m; print(len(m.current_registry()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout == "0\n"
