"""`retry`, `cancel`, `run-now` by filters, and `rerun`."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from durable_actors import _bulk
from durable_actors.cli import many
from psycopg.types.json import Jsonb
from tests.cli.conftest import Shell

TOLD = {
    "id", "command", "state", "count", "done", "skipped", "failed", "failures", "answers", "instance_id", "repeated",
}  # fmt: skip


def test_retry_by_filter(shell: Shell):
    a = shell.add(status="failed", last_error="no such host")
    b = shell.add(status="failed", last_error="no such host", fsm="other")
    c = shell.add(status="failed", last_error="else")
    shell.add(last_error="no such host")  # runs
    filters = ["--status", "failed", "--machine", "shop:Checkout", "--error", "such host"]
    assert shell.ok("retry", *filters, "--dry-run") == "retry would change 1 instance\n"
    assert shell.row(a, "status") == ("failed",)
    assert shell.ok("retry", *filters, "--by", "ada", "--reason", "dns") == "retry of 1 instance: 1 done\n"
    assert shell.ok("retry", *filters) == "no instance matches the filters\n"
    assert shell.row(a, "status") == ("runnable",)
    told = shell.json("retry", "--older-than", "0")
    assert set(told) == TOLD
    assert (told["count"], told["done"], told["state"]) == (2, 2, "finished")
    assert {shell.row(each, "status") for each in (b, c)} == {("runnable",)}
    newest, _, of_all, *_ = shell.json("audit")["receipts"][::-1]
    assert (of_all["scope"], newest["scope"]) == ("bulk", "bulk")
    shown = shell.ok("audit")
    assert "all error=such host, machine=shop:Checkout, status=failed" in shown
    assert "1 of 1 done" in shown


def test_a_key_that_was_used_says_that_nothing_is_done_now(shell: Shell):
    """Straight after it, when nothing matches any more, and when others have failed since."""
    first = shell.add(status="failed", last_error="X")
    given = ["retry", "--error", "X", "--yes", "--by", "ada", "--idempotency-key", "incident-7"]
    assert shell.ok(*given) == "retry of 1 instance: 1 done\n"
    said = shell.ok(*given)
    assert re.fullmatch(
        r"retry of 1 instance: given before \(\d{4}-\d\d-\d\d \d\d:\d\d \S+, by ada\): 1 done; nothing was done now\n",
        said,
    )
    other = shell.add(status="failed", last_error="X")
    assert shell.ok(*given) == said
    assert shell.json(*given)["repeated"] is True
    assert shell.ok(*given, "--dry-run") == "retry would change 1 instance\n"
    assert (shell.row(first, "status"), shell.row(other, "status")) == (("runnable",), ("failed",))
    assert shell.json(*given[:-1], "incident-8")["repeated"] is False
    background = ["retry", "--error", "X", "--status", "cancelled", "--background", "--idempotency-key", "b"]
    shell.add(status="cancelled", last_error="X")
    shell.ok(*background)
    again = shell.ok(*background)
    assert again.startswith("retry of 1 instance: given before (")
    assert "): it runs in the background, as instance " in again


@pytest.mark.parametrize("key", [None, "incident-7"])
def test_ctrl_c_tells_what_is_done_and_how_to_go_on(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, key: str | None
):
    monkeypatch.setattr(_bulk, "BATCH", 2)
    plain = _bulk.BulkCalls._one
    for _ in range(5):
        shell.add(status="failed")
    begun: list[int] = []

    async def one(self: Any, kind: Any, target: Any, *rest: Any) -> bool:
        begun.append(target.id)
        if len(begun) == 4:
            raise KeyboardInterrupt
        return await plain(self, kind, target, *rest)

    monkeypatch.setattr(_bulk.BulkCalls, "_one", one)
    named = [] if key is None else ["--idempotency-key", key]
    said = shell.refused("retry", "--status", "failed", *named)
    go_on = "the same command does the rest" if key is None else f"with --idempotency-key {key} it goes on"
    assert (
        said
        == f"durable-actors: interrupted: at least 3 of 5 instances are done, and stay so; given again, {go_on}\n"
    )
    told = shell.ok("retry", "--status", "failed", *named)
    if key is None:
        assert told == "retry of 2 instances: 2 done\n"
    else:
        assert told.startswith("retry of 5 instances: given before (")
        assert told.endswith("): 5 done; the rest was done now\n")


def test_needs_targets_or_filters(shell: Shell):
    for verb in ("retry", "cancel", "run-now"):
        for arguments in ([], ["1", "--queue", "q"]):
            assert "filters such as --status failed" in shell.refused(verb, *arguments, code=2)
        assert "--background goes with filters" in shell.refused(verb, "1", "--background", code=2)
    assert "Invalid value" in shell.refused("retry", "--status", "done", code=2)


def test_pause_and_resume_by_filter(shell: Shell):
    due, runs = shell.add(queue="q"), shell.add(queue="q", status="executing")
    assert shell.ok("pause", due, "--dry-run") == f"{due} would be paused\n"
    said = shell.run("pause", "--queue", "q", "--reason", "odd")
    assert said.stdout == "pause of 2 instances: 1 paused, 1 requested\n"
    assert "is paused already" in shell.refused("pause", due, "--dry-run")
    assert shell.ok("pause", "--queue", "q") == "no instance matches the filters\n"
    assert shell.ok("resume", "--status", "runnable") == "resume of 1 instance: 1 done\n"
    assert shell.ok("resume", runs) == f"{runs} resumed\n"


def test_cancel_and_run_now_by_filter(shell: Shell):
    later = shell.add(queue="q", eligible_at="tomorrow", tags=["t"])
    runs = shell.add(queue="q", status="executing")
    failed = shell.add(queue="q", status="failed", unique_key=b"k")
    shell.add(unique_key=b"k")
    assert shell.ok("run-now", later, "--dry-run") == f"{later} would run now\n"
    assert shell.ok("run-now", "--tag", "t") == "run-now of 1 instance: 1 hastened\n"
    assert shell.ok("run-now", later) == f"{later} was due already\n"
    assert "only a runnable one can be run now" in shell.refused("run-now", runs)
    said = shell.run("cancel", "--queue", "q", "--yes")
    assert said.stdout == "cancel of 2 instances: 1 cancelled, 1 requested\n"
    refused = shell.run("retry", "--queue", "q")
    assert refused.exit_code == 1
    assert refused.stdout == "retry of 1 instance: 0 done, 1 failed\n"
    assert refused.stderr == f"durable-actors: instance {failed}: another instance occupies its unique key\n"


def test_more_than_a_hundred_are_confirmed(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    shell.conn.execute(
        "insert into durable.gen_durable (fsm, step, state) select 'm', 's', '{}' from generate_series(1, 101)"
    )
    assert "would change 101 instances: say --yes" in shell.refused("cancel", "--machine", "m", code=2)
    monkeypatch.setattr(many, "TELL_EVERY", 0)
    asked: list[Any] = []

    def confirm(text: str, **options: Any) -> None:
        asked.append((text, options))

    monkeypatch.setattr(many.click, "confirm", confirm)
    monkeypatch.setattr(many, "_confirm", lambda name, count, *, yes: confirm(f"{name} {count}", yes=yes))
    result = shell.run("cancel", "--machine", "m")
    assert (result.exit_code, asked) == (0, [("cancel 101", {"yes": False})])
    assert "durable-actors: 100 of 101\n" in result.stderr
    assert shell.ok("cancel", "--machine", "m", "--yes") == "no instance matches the filters\n"


@pytest.mark.parametrize(
    ("terminal", "count", "yes"), [(True, 101, False), (True, 100, False), (False, 101, True)]
)
def test_who_is_asked(monkeypatch: pytest.MonkeyPatch, terminal: bool, count: int, yes: bool):
    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(many.click, "confirm", lambda text, **_: asked.append(text))
    many._confirm("run_now", count, yes=yes)
    assert asked == (["run-now 101 instances?"] if terminal and count > 100 else [])


def test_in_the_background(shell: Shell):
    shell.add(status="failed")
    told = shell.json("retry", "--status", "failed", "--background")
    assert (told["state"], told["count"], told["done"]) == ("running", 1, 0)
    assert shell.row(told["instance_id"], "fsm, queue, status") == ("durable:bulk", "durable.ops", "runnable")
    assert "1 matched; no end is recorded" in shell.ok("audit")
    said = shell.ok("retry", "--everything", "--background")
    assert said.startswith("retry of 1 instance runs in the background, as instance ")
    shell.ok("cancel", told["instance_id"])


def test_rerun(shell: Shell):
    old = shell.add(
        state=Jsonb({"n": 1}), unique_key=b"order:1", fsm="shop:Unknown"
    )  # here: other tests define Checkout
    new = int(shell.ok("rerun", "order:1", "--by", "ada"))
    assert shell.row(new, "fsm, step, state, unique_key, rerun_of") == (
        "shop:Unknown",
        "charge",
        {"n": 1},
        None,
        old,
    )
    assert f"rerun of   {old}" in shell.ok("show", new)
    assert f"(rerun of {old})" in shell.ok("tree", new)
    given = shell.json("rerun", old, "--step", "ship", "--state", "[1]")["id"]
    assert shell.row(given, "step, state") == ("ship", [1])
    assert "has no record of revision 1" in shell.refused("rerun", old, "--at-rev", "1")
    assert "there is no instance 999" in shell.refused("rerun", "999")
    assert "--state" in shell.refused("rerun", old, "--state", "{", code=2)
    assert {each["command"] for each in shell.json("audit", old)["receipts"]} == {"rerun"}


def test_rerun_of_a_workflow_from_a_task(shell: Shell):
    """The command line knows no machine: what comes after what is read from the children."""
    old = shell.add(fsm="shop:Report", step="finish", visit=2, status="failed", state=Jsonb({"year": 2026}))
    tasks = {"fetch": "done", "rates": "done", "charts": "failed", "mail": "cancelled"}
    ids = {
        name: shell.add(
            fsm=f"shop:Report.{name}", step="perform", status=status, parent_id=old, barrier=2, child_key=name,
            links=1, result=Jsonb([name]) if status == "done" else None,
        )
        for name, status in tasks.items()
    }  # fmt: skip
    edges = [("charts", ["fetch", "rates"]), ("mail", ["charts"])]
    shell.conn.cursor().executemany(
        "insert into durable.graph (id, needs, waits) values (%s, %s, 0)",
        [(ids[name], [ids[each] for each in after]) for name, after in edges],
    )
    new = int(shell.ok("rerun", old, "--step", "charts"))
    carried = {"fetch": ["fetch"], "rates": ["rates"]}
    assert shell.row(new, "step, state") == ("rerun", {"params": {"year": 2026}, "carried": carried})
    unbegun = shell.refused("rerun", new, "--step", "rates")
    assert f"instance {new} has not begun, so its tasks are not known here: rerun instance {old}" in unbegun
    assert shell.row(int(shell.ok("rerun", new)), "step, state") == ("start", {"year": 2026})
    other = int(shell.ok("rerun", old, "--step", "rates", "--state", '{"year": 7}'))
    carried = {"fetch": ["fetch"]}
    assert shell.row(other, "step, state") == ("rerun", {"params": {"year": 7}, "carried": carried})
    told = shell.refused("rerun", old, "--step", "chart")
    assert "shop:Report v1 has no task 'chart'; its tasks are fetch, rates, charts, mail" in told
    assert shell.row(int(shell.ok("rerun", old)), "step, state") == ("start", {"year": 2026})


def test_rerun_in_a_step_that_no_live_node_has(shell: Shell):
    old = shell.add(fsm="shop:Unknown")  # here: other tests define Checkout
    assert shell.run("rerun", old, "--step", "pai").stderr == "", "nobody knows the machine"
    steps = {"shop:Unknown/1": ["charge", "pay"]}
    shell.node("n:1", queues={"default": 1}, machines=[*steps], steps=steps)
    said = shell.run("rerun", old, "--step", "pai")
    new = int(said.stdout)
    assert said.stderr == (
        f"durable-actors: no live node has step 'pai' of shop:Unknown/1 (did you mean 'pay'?): instance {new} "
        f"waits for one that has; `durable-actors cancel {new}` ends it\n"
    )
    assert "(they have: charge, pay)" in shell.run("rerun", old, "--step", "x", "--json").stderr
    assert shell.run("rerun", old, "--step", "pay").stderr == ""


def test_every_verb_takes_what_an_instance_waits_for(shell: Shell):
    """And whether it is paused: the same filters as `list`."""
    asks = {"status": "awaiting_signal", "awaits": [], "manual": Jsonb({"kind": "approval", "then": "x"})}
    first, other = shell.add(**asks), shell.add(status="awaiting_signal", awaits=["go"])
    paused, delayed = shell.add(), shell.add(eligible_at="tomorrow")
    shell.ok("pause", paused, other, delayed)
    assert [each["id"] for each in shell.json("list", "--paused")["instances"]] == [delayed, paused, other]
    assert shell.json("list", "--paused", "--waiting", "signal")["instances"][0]["id"] == other
    assert shell.ok("cancel", "--waiting", "approval") == "cancel of 1 instance: 1 cancelled\n"
    assert shell.row(first, "status") == ("cancelled",)
    assert shell.row(other, "status") == ("awaiting_signal",)
    assert shell.ok("run-now", "--paused") == "run-now of 1 instance: 1 paused\n"
    assert shell.ok("resume", "--paused", "--waiting", "signal") == "resume of 1 instance: 1 done\n"
    assert shell.ok("cancel", "--paused") == "cancel of 2 instances: 2 cancelled\n"
    assert shell.row(other, "status") == ("awaiting_signal",)
    assert shell.json("list", "--paused")["instances"] == [], "what has ended is not paused"
    for verb, why in (("pause", "not apply to instances that are paused"), ("retry", "only a failed")):
        refused = shell.run(verb, "--paused")
        assert refused.exit_code != 0
        assert why in refused.stderr
