"""`durable-actors graph`: of an instance and of a machine, in every format, to a file, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import durable_actors as da
import pytest
import trio
from durable_actors.machine import isolated_registry
from tests.cli.conftest import Shell

REPORT = "examples:report"


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module `orders` with a machine that has another name than its class, and a workflow."""
    module = ModuleType("orders")
    with isolated_registry():

        class Order(da.Machine, name="order", journal="outcomes"):
            @da.step(initial=True)
            async def begin(self, ctx: da.Context) -> da.Outcome:
                return da.Next(self.ask)

            @da.step
            async def ask(self, ctx: da.Context) -> da.Outcome:
                return da.Approval(self.ship, on_reject=self.refund, timeout=3600, title="Ship?")

            @da.step
            async def ship(self, ctx: da.Context) -> da.Outcome:
                return da.Done()

            @da.step
            async def refund(self, ctx: da.Context) -> da.Outcome:
                return da.Stop("refunded")

            @da.step
            async def lost(self, ctx: da.Context) -> da.Outcome:
                return da.Next(ctx.state["step"])

        class Report(da.Workflow, name="report"):
            @da.task(max_attempts=1)
            async def fetch(self, ctx: da.Context) -> int:
                return 1

            @da.task(max_attempts=1)
            async def rates(self, ctx: da.Context) -> int:
                raise ValueError("no <rates>")

            @da.task(after=[fetch, rates])
            async def mail(self, ctx: da.Context) -> int:
                return 2

        for each in (Order, Report):  # as if they were written in that module
            object.__setattr__(each.__durable__, "identity", ("orders", each.__name__))
        monkeypatch.setitem(sys.modules, "orders", module)
        module.Order, module.Report = Order, Report  # type: ignore[attr-defined]
        yield module


def start(shell: Shell, machine: type) -> int:
    """Start an instance and run it until it waits or has ended."""

    async def run() -> int:
        async with da.open_client(shell.dsn) as client:
            number = await client.insert(machine, unique_key="key:1")
            while await client.execute_next() is not None:
                pass
            return number

    return trio.run(run)


def test_a_machine_from_its_source_needs_no_database(shell: Shell, orders: ModuleType):
    expected = [
        "order v1",
        "",
        "○ start",
        "    → begin",
        "○ begin",
        "    → ask",
        "○ ask",
        "    → ship    approved",
        "    → refund  rejected",
        "    → refund  nobody decides within 60 min",
        "○ ship",
        "    → done",
        "○ refund",
        "    → failed",
        "○ lost",
        "",
        "note: nothing enters lost, as far as the source shows; insert(step=...) could",
        "      start there",
    ]
    for arguments in (["order", "--module", "orders"], ["orders:Order"]):
        result = shell.run("graph", *arguments, "--no-observed", env={"DURABLE_DSN": "port=1"})
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[: len(expected)] == expected
        assert "note: not followed: da.Next(ctx.state['step']) (step lost, line " in result.stdout
    # Without a DSN that would be the embedded server, which nobody starts for this.
    result = shell.run("graph", "orders:Order", env={"DURABLE_DSN": "", "PGHOST": "", "PGSERVICE": ""})
    assert result.exit_code == 0, result.output
    assert shell.run("graph", "orders:Order", env={"DURABLE_DSN": "port=1"}).exit_code == 1


def test_an_instance_of_a_machine(shell: Shell, orders: ModuleType):
    number = start(shell, orders.Order)
    for arguments in ([number], ["--key", "key:1"]):
        lines = shell.ok("graph", *arguments, "--module", "orders").splitlines()
        assert lines[0] == f"instance {number} of order v1: awaiting_signal in ask"
        assert "✓ begin  done" in lines
        assert "    ⇒ ask" in lines
        assert "◌ ask  waiting, for a person: Ship?" in lines
        assert "    → ship    approved" in lines
    shell.ok("approve", number)
    observed = shell.json("graph", "orders:Order")
    assert not any(edge["observed"] for edge in observed["edges"])


def test_the_tasks_of_an_instance_in_every_format(shell: Shell, orders: ModuleType, tmp_path: Path):
    number = start(shell, orders.Report)
    lines = shell.ok("graph", number).splitlines()
    assert lines[0] == f"report {number}, failed: 3 tasks (1 done, 1 failed, 1 cancelled)"
    assert lines[2].startswith("  1 ✓ fetch  done, ")
    assert lines[3].startswith("    ✗ rates  failed, ")
    assert lines[4].startswith("  2 ⊘ mail   cancelled, upstream failed: rates failed")
    assert lines[-1].split() == ["←", "fetch,", "rates"] or "← fetch, rates" in lines[-1]
    assert shell.ok("graph", number, "--format", "mermaid").splitlines()[3] == "flowchart TD"
    assert shell.ok("graph", number, "--format", "dot").startswith("digraph {\n")
    file = tmp_path / "report.svg"
    assert shell.ok("graph", number, "--format", "svg", "-o", file) == ""
    shown = "".join(ET.fromstring(file.read_text()).itertext())
    assert "no <rates>" in shown
    document = shell.json("graph", number)
    assert document == json.loads(shell.ok("graph", number, "--json"))
    assert [node["facts"]["status"] for node in document["nodes"]] == ["done", "failed", "cancelled"]
    assert document["nodes"][2]["facts"]["after"] == [node["facts"]["id"] for node in document["nodes"][:2]]
    assert len(document["edges"]) == 2
    shell.ok("graph", number, "--json", "-o", tmp_path / "graph.json")
    assert json.loads((tmp_path / "graph.json").read_text()) == document
    steps = shell.ok("graph", number, "--steps").splitlines()
    assert steps[0] == f"instance {number} of report v1: failed in finish"


def test_a_limit_is_told(shell: Shell, orders: ModuleType):
    number = start(shell, orders.Report)
    lines = shell.ok("graph", number, "--limit", "1").splitlines()
    assert lines[2].startswith("  1 ✗ rates  failed")
    assert lines[-1] == "… and 2 more: 1 cancelled, 1 done; 2 lines not drawn"
    assert shell.json("graph", number, "--limit", "1")["hidden"] == {"done": 1, "cancelled": 1}


def test_an_instance_whose_machine_is_not_imported(shell: Shell):
    number = shell.add(fsm="shop:\n[bold]Check", step="[red]<charge>\x1b")
    lines = shell.ok("graph", number).splitlines()
    assert lines[0] == f"instance {number} of shop:\\n[bold]Check v1: runnable in [red]<charge>\\x1b"
    assert lines[2] == "○ [red]<charge>\\x1b  ready"
    assert lines[4].startswith("note: its machine is not known here")


def test_what_is_refused(shell: Shell, orders: ModuleType, tmp_path: Path):
    number = shell.add()
    assert "there is no instance 77" in shell.refused("graph", "77")
    assert f"instance {number} has no children of barrier 3" in shell.refused(
        "graph", number, "--barrier", "3"
    )
    hint = "for an instance give its id, or --key and its unique key"
    assert hint in shell.refused("graph", "nobody")
    assert hint in shell.refused("graph", "no.such.module:Thing")
    assert hint in shell.refused("graph", "orders:Other")
    assert "--barrier and --steps are for an instance" in shell.refused(
        "graph", "orders:Order", "--steps", code=2
    )
    assert "is not one of 'text', 'mermaid', 'dot', 'svg'" in shell.refused(
        "graph", number, "--format", "png", code=2
    )
    nowhere = tmp_path / "no" / "file.svg"
    assert "cannot write" in shell.refused("graph", number, "-o", nowhere)
