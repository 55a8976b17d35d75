"""`versions` and `check`: what live instances need of the code, and whether some code has it."""

from __future__ import annotations

import json
from types import ModuleType

import attrs
import durable_actors as da
import pytest
from tests.cli.conftest import Shell

LINE = {"status": "awaiting_signal", "awaits": ["paid"], "await_step": "ship", "state": '{"order": 1}'}


def by_version(shell: Shell, *arguments: str) -> dict[tuple[str, int], tuple[int, int, bool]]:
    found = shell.json("versions", *arguments)
    return {
        (each["machine"], each["version"]): (each["live"], each["failed"], each["removable"])
        for each in found
    }


def kinds(shell: Shell, *arguments: str) -> list[tuple[str, str, int, str | None, int]]:
    result = shell.run("check", "shop", "--against", shell.dsn, "--json", *arguments)
    answer = json.loads(result.stdout)
    assert result.exit_code == (0 if answer["safe"] else 3)
    assert answer["safe"] is not bool(answer["findings"])
    names = ("kind", "machine", "version", "step", "instances")
    return [tuple(each[name] for name in names) for each in answer["findings"]]


def test_who_needs_which_version(shell: Shell, shop: ModuleType):
    shell.add(**LINE)
    shell.add(status="done")
    shell.add(fsm_version=2, status="failed")
    shell.add(fsm_version=3, state='{"order": 1}')
    shell.add(fsm="gone", status="cancelled")
    assert by_version(shell) == {
        ("shop:Checkout", 1): (1, 0, False),
        ("shop:Checkout", 2): (0, 1, True),
        ("shop:Checkout", 3): (1, 0, False),
    }
    code = by_version(shell, "shop")
    assert code["shop:send", 1] == (0, 0, True)
    text = shell.ok("versions", "shop")
    assert "can be removed; 1 failed instance could not be retried" in text
    assert "MISSING in these modules" in text
    assert " keep" in text
    assert "the newest; no live instance" in text
    steps = shell.ok("versions", "--steps")
    assert "ship" in steps


def test_a_boundary_may_lead_to_several_steps(shell: Shell, shop: ModuleType):
    manual = '{"kind": "approval", "then": "ship", "on_reject": "charge", "on_timeout": "gone"}'
    shell.add(status="awaiting_signal", awaits=[], manual=manual, state='{"order": 1}')
    [version] = shell.json("versions")
    assert version["live"] == 1
    assert {each["step"]: each["live"] for each in version["steps"]} == {"charge": 1, "gone": 1, "ship": 1}
    assert kinds(shell) == [("step", "shop:Checkout", 1, "gone", 1)]


def test_the_code_can_go_on(shell: Shell, shop: ModuleType):
    shell.add(**LINE)
    shell.add(state='{"order": 1}')
    shell.add(status="failed", step="gone")
    shell.add(status="done", fsm="gone")
    assert kinds(shell) == []
    assert "2 machines checked; every live instance can go on" in shell.ok(
        "check", "shop", "--against", shell.dsn
    )


def test_what_the_code_does_not_have(shell: Shell, shop: ModuleType):
    shell.add(fsm="gone")
    shell.add(fsm_version=2)
    shell.add(step="pack", state='{"order": 1}')
    shell.add(**{**LINE, "await_step": "deliver"})
    assert kinds(shell) == [
        ("machine", "gone", 1, None, 1),
        ("step", "shop:Checkout", 1, "deliver", 1),
        ("step", "shop:Checkout", 1, "pack", 1),
        ("machine", "shop:Checkout", 2, None, 1),
    ]
    said = shell.run("check", "shop", "--against", shell.dsn)
    assert said.exit_code == 3
    assert "this code has version 1: keep version 2" in said.stdout
    assert "this code does not have the machine" in said.stdout


def test_states_that_the_code_cannot_read(shell: Shell, shop: ModuleType):
    for number in range(3):
        shell.add(state=f'{{"order": {number}}}')
    bad = shell.add(state='{"number": 4}')
    assert kinds(shell) == [("state", "shop:Checkout", 1, "charge", 1)]
    said = shell.run("check", "shop", "--against", shell.dsn).stdout
    assert f"1 of 4 states that were tried do not fit this code: instance {bad}: shop:Checkout v1" in said
    assert "missing required field" in said
    assert kinds(shell, "--sample", "0") == []


def test_only_the_code(shell: Shell, shop: ModuleType):
    shell.add(fsm="gone")
    said = shell.ok("check", "shop")
    assert said.startswith("2 machines checked; nothing is compared with live instances, unless --against")

    @attrs.define
    class State:
        later: "Later"  # type: ignore[name-defined]  # noqa: F821, UP037

    class Cart(da.Machine[State], name="cart"):
        @da.step
        async def start(self, ctx: da.Context) -> da.Outcome:
            return da.Done()

    assert "cart v1" in shell.refused("check", "shop")


@pytest.mark.parametrize("dsn", ["host=127.0.0.1 port=1 connect_timeout=1", "dbname=nobody_has_this"])
def test_what_could_not_be_checked_is_another_code(shell: Shell, shop: ModuleType, dsn: str):
    assert shell.run("check", "shop", "--against", dsn).exit_code == 1
