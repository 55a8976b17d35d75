"""`durable-actors pause`, `resume` and `queue`, and what the other commands show of what is paused."""

from __future__ import annotations

import getpass
from datetime import UTC, datetime, timedelta

from tests.cli.conftest import Shell


def test_instances(shell: Shell):
    number, keyed, running = shell.add(), shell.add(unique_key=b"order:1"), shell.add(status="executing")
    said = shell.ok("pause", number, "order:1", running, "--by", "ada", "--reason", "odd")
    waits = "requested: a step runs; it is paused when the step has ended"
    assert said == f"{number} paused\n{keyed} paused\n{running} {waits}\n"
    assert "runnable, paused" in shell.ok("list")
    assert "it was paused" in (shown := shell.ok("show", number))
    assert "by ada: odd" in shown
    found = {each["id"]: each for each in shell.json("list")["instances"]}
    assert (found[number]["hold"], found[number]["request"]["by"]) == (4, "ada")
    assert shell.json("queues")[0]["paused"] == 2
    assert shell.json("resume", number) == [{"id": number, "result": "resumed", "reason": None}]
    result = shell.run("resume", number, keyed)
    assert (result.exit_code, result.stdout) == (1, f"{keyed} resumed\n")
    refused = f"durable-actors: not resumed: instance {number} is runnable, and not paused\n"
    assert result.stderr == refused
    result = shell.run("pause", running, 999)
    assert result.exit_code == 1
    assert "is paused already by ada" in result.stderr
    assert "there is no instance 999" in result.stderr
    assert len(shell.json("audit", "--command", "pause")["receipts"]) == 3


def test_a_queue_that_nobody_knows_is_paused_with_a_note(shell: Shell):
    """It may be empty for now; but the name may be misspelled."""
    shell.node("n:1", queues={"mail": 1}, machines=["shop:send/1"])
    shell.node("n:2", queues={"dead": 1}, machines=["shop:send/1"], alive=False)
    shell.add(queue="old", status="done", fsm="shop:old")
    note = "durable-actors: note: no live node serves queue 'dead', and it has no rows: is the name right?\n"
    for extra in ([], ["--json"]):
        said = shell.run("queue", "pause", "dead", *extra)
        assert (said.exit_code, said.stderr[-len(note) :]) == (0, note)
    of = "note: no live node that serves queue 'mail' knows machine 'shop:nosuch', and it has no rows there"
    assert of in shell.run("queue", "pause", "mail", "--machine", "shop:nosuch").stderr
    for known in (["mail"], ["old"], ["mail", "--machine", "shop:send"], ["old", "--machine", "shop:old"]):
        assert "note:" not in shell.run("queue", "pause", *known).stderr
    assert "knows machine 'shop:send'" in shell.run("queue", "pause", "old", "--machine", "shop:send").stderr


def test_queues(shell: Shell):
    number = shell.add(queue="mail", eligible_at="yesterday")
    assert shell.ok("queue", "pause", "mail", "--reason", "SMTP is down") == (
        f"queue 'mail' is paused by {getpass.getuser()}: SMTP is down\n"
    )
    later = datetime.now(UTC) + timedelta(hours=2)
    found = shell.json("queue", "pause", "mail", "--machine", "m", "--until", "2h", "--by", "ada")
    assert (found["machine"], found["by"]) == ("m", "ada")
    assert abs(datetime.fromisoformat(found["until"]) - later) < timedelta(minutes=5)
    shown = shell.ok("queues")
    assert "mail PAUSED" in shown
    assert "queue 'mail' is paused by" in shown
    assert "1 due" in shown
    facts = shell.ok("why", number)
    assert "pauses [{queue mail, " in facts
    assert "datetime" not in facts
    assert "machine 'm' in queue 'mail' is paused until" in shell.ok("top", "--count", 1)
    [view] = shell.json("queues")
    assert [each["machine"] for each in view["pauses"]] == [None, "m"]
    assert shell.ok("queue", "resume", "mail").startswith("queue 'mail' is resumed; it was paused by")
    assert "mail (partly paused)" in shell.ok("queues")
    shell.ok("queue", "resume", "mail", "--machine", "m")
    assert "queue 'mail' is not paused" in shell.refused("queue", "resume", "mail")
    receipts = shell.json("audit")["receipts"]
    assert [(each["command"], each["scope"], each["target"]) for each in receipts] == [
        ("resume", "queue", "mail/m"), ("resume", "queue", "mail"),
        ("pause", "queue", "mail/m"), ("pause", "queue", "mail"),
    ]  # fmt: skip


def test_until(shell: Shell):
    found = shell.json("queue", "pause", "q", "--until", "2999-05-01T18:00+02:00")
    assert datetime.fromisoformat(found["until"]) == datetime(2999, 5, 1, 16, tzinfo=UTC)
    assert "neither a duration" in shell.refused("queue", "pause", "q", "--until", "soon", code=2)


def test_a_node_that_is_too_old(shell: Shell):
    shell.node("old:1", queues={}, machines=[], version="0.1.0")
    assert "node old:1 (0.1.0) ignores pauses" in shell.run("queue", "pause", "q").stderr
    assert "ignores pauses" in shell.run("pause", shell.add()).stderr
