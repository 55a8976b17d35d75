"""`durable-actors cancel`, and what the other commands show of cancelled instances."""

from __future__ import annotations

import getpass

from tests.cli.conftest import Shell

REQUESTED = (
    "requested: its node cancels the step (one in a thread runs to its end), or it compensates; then it ends"
)


def test_by_id_and_by_key(shell: Shell):
    number, keyed = shell.add(), shell.add(unique_key=b"order:1")
    assert shell.ok("cancel", number, "order:1", number) == f"{number} cancelled\n{keyed} cancelled\n"
    assert {each["id"] for each in shell.json("list", "--status", "cancelled")["instances"]} == {
        number,
        keyed,
    }
    newest, _ = shell.json("audit")["receipts"]
    assert (newest["command"], newest["by"], newest["result"]) == ("cancel", getpass.getuser(), "cancelled")


def test_what_runs_is_asked_or_forced(shell: Shell):
    number = shell.add(status="executing")
    said = f"{number} {REQUESTED}\n"
    assert shell.ok("cancel", number, "--by", "ada", "--reason", "wrong order") == said
    assert "cancel requested by ada" in shell.ok("show", number)
    assert shell.json("cancel", number) == [{"id": number, "result": "requested", "reason": None}]
    assert shell.ok("cancel", number, "--force", "--by", "bob", "--reason", "now") == f"{number} cancelled\n"
    shown = shell.ok("show", number)
    assert "it has ended: cancelled in step 'charge' by bob: now; `durable-actors retry" in shown


def test_what_is_refused(shell: Shell):
    done, live = shell.add(status="done"), shell.add()
    result = shell.run("cancel", done, live, 999, "nobody's")
    assert result.exit_code == 1
    assert result.stdout == f"{live} cancelled\n"
    first, second, third = result.stderr.splitlines()
    assert first == (
        f"durable-actors: not cancelled: instance {done} is done, and only one that has not ended can be cancelled"
    )
    assert second == "durable-actors: not cancelled: there is no instance 999"
    assert third.startswith(
        'durable-actors: not cancelled: no instance has or had the unique key "nobody\'s"; '
    )
    assert "give either TARGETs" in shell.refused("cancel", code=2)


def test_with_its_children(shell: Shell):
    parent = shell.add(status="awaiting_children")
    children = [shell.add(parent_id=parent), shell.add(parent_id=parent, status="executing")]
    assert shell.ok("cancel", parent, "--children", "cancel", "--reason", "why") == f"{parent} cancelled\n"
    assert f"it has ended: cancelled in step 'charge' by {getpass.getuser()}: why" in shell.ok(
        "why", children[0]
    )
    assert "cancel requested" in shell.ok("why", children[1])
    assert "Invalid value" in shell.refused("cancel", parent, "--children", "some", code=2)


def test_what_compensates(shell: Shell):
    number = shell.add(unique_key=b"k")
    shell.conn.execute(
        "insert into durable.compensations select fsm, fsm_version, 'undo' from durable.gen_durable"
    )
    assert shell.ok("cancel", "k", "--by", "ada") == f"{number} {REQUESTED}\n"
    assert "it compensates: cancelled by ada" in shell.ok("why", number)
    assert "compensates in step 'undo'; force=True ends it" in shell.refused("cancel", number)
    assert shell.ok("cancel", number, "--force") == f"{number} cancelled\n"


def test_the_same_key_again(shell: Shell):
    number = shell.add()
    for _ in range(2):
        assert shell.ok("cancel", number, "--idempotency-key", "k") == f"{number} cancelled\n"
    assert len(shell.json("audit", "--command", "cancel")["receipts"]) == 1


def test_a_node_that_is_too_old_to_notice(shell: Shell):
    number = shell.add(status="executing", locked_by="old:1")
    shell.node("old:1", queues={}, machines=[], version="0.1.0")
    result = shell.run("cancel", number)
    assert result.exit_code == 0
    assert "node old:1 (0.1.0) ignores commands to running steps" in result.stderr
