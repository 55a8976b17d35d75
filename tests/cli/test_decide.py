"""`durable-actors proceed`, `approve`, `reject`, and what the other commands show of who waits for a person."""

from __future__ import annotations

from psycopg.types.json import Jsonb
from tests.cli.conftest import Shell


def asking(shell: Shell, kind: str = "approval", **columns: object) -> int:
    """An instance that waits for a person."""
    boundary = {"kind": kind, "then": "pay", "title": "Refund?", "data": {"cents": 5}}
    return shell.add(status="awaiting_signal", awaits=[], manual=Jsonb(boundary), **columns)


def test_who_waits_is_listed_and_decided(shell: Shell):
    first, keyed, paused = asking(shell), asking(shell, unique_key=b"order:1"), asking(shell, "pause")
    shell.add(status="awaiting_signal", awaits=["go"])
    listed = shell.ok("list", "--waiting", "approval")
    assert "waits for a person (approval)" in listed
    assert "Refund?" in listed
    assert [each["id"] for each in shell.json("list", "--waiting", "approval")["instances"]] == [keyed, first]
    assert [each["id"] for each in shell.json("list", "--waiting", "pause")["instances"]] == [paused]
    assert len(shell.json("list", "--waiting", "signal")["instances"]) == 1
    assert shell.json("queues", "--quick")[0]["asks"] == 3
    assert "3 instances wait for a person" in shell.ok("queues")
    assert shell.json("top")["queues"][0]["asks"] == 3
    assert "3 instances wait for a person" in shell.ok("top")
    shown = shell.ok("show", first)
    for line in (
        "asks       Refund?",
        'data       {"cents": 5}',
        "why        it waits for an approval (Refund?)",
    ):
        assert line in shown
    assert f"durable-actors approve {first}" in shell.ok("why", first)
    said = shell.ok("approve", first, "order:1", "--by", "ada", "--comment", "fine", "--data", '{"a": null}')
    assert said == f"{first} approved\n{keyed} approved\n"
    assert shell.ok("proceed", paused) == f"{paused} proceeds\n"
    assert shell.row(first, "status, step, manual -> 'decision' ->> 'by', manual #> '{decision,data}'") == (
        "runnable", "pay", "ada", {"a": None},
    )  # fmt: skip
    assert "it was approved by ada" in shell.ok("show", first)
    [*_, newest] = shell.json("audit", "--command", "approve")["receipts"]
    assert (newest["by"], newest["data"]) == ("ada", {"comment": "fine"})


def test_who_is_paused_while_it_asks_is_shown_as_both(shell: Shell):
    number = asking(shell)
    shell.ok("pause", number)
    for shown in (shell.ok("list"), shell.ok("show", number)):
        assert "waits for a person (approval), paused" in shown


def test_what_is_refused_is_said_and_the_rest_is_done(shell: Shell):
    waits, done = asking(shell), shell.add(status="done")
    result = shell.run("reject", waits, done, 999, "--by", "ada", "--comment", "no")
    assert (result.exit_code, result.stdout) == (1, f"{waits} rejected\n")
    first, second = result.stderr.splitlines()
    why = "only one that waits for an approval can be rejected"
    assert first == f"durable-actors: not rejected: instance {done} is done, and {why}"
    assert second == "durable-actors: not rejected: there is no instance 999"
    again = shell.run("approve", waits, "--json")
    assert again.exit_code == 1
    assert "is failed (rejected by ada: no)" in again.stderr
    assert shell.row(waits, "status, last_error") == ("failed", "rejected by ada: no")
    assert "--data" in shell.refused("approve", waits, "--data", "{", code=2)


def test_who_decided_is_known_after_the_step(shell: Shell):
    """The row forgets a decision with the step that got it; the receipt does not. Nobody, if the time was up."""
    number = asking(shell, "pause")
    shell.ok("proceed", number, "--by", "ada", "--comment", "go")
    shell.ok("pause", number)
    shell.conn.execute(
        "update durable.gen_durable set status = 'done', finished_at = now(), manual = null, request = null"
        " where id = %s",
        [number],
    )
    said = shell.refused("proceed", number)
    assert said.startswith(
        f"durable-actors: not let proceed: instance {number} is done, and only one that waits"
    )
    assert "can be let proceed; it was let proceed by ada at " in said
    assert said.endswith(": go\n")
    late = shell.add(manual=Jsonb({"kind": "approval", "decision": {"kind": "timed_out"}}))
    assert f"instance {late} is runnable (nobody decided in time), and only" in shell.refused("approve", late)


def test_the_same_key_again_is_harmless(shell: Shell):
    number = asking(shell)
    for _ in range(2):
        assert shell.ok("approve", number, "--idempotency-key", "k") == f"{number} approved\n"
    assert len(shell.json("audit", "--command", "approve")["receipts"]) == 1
