"""Commands on the command line: who gives them, their receipts (`audit`), and what `show` tells of them."""

from __future__ import annotations

import getpass
import re
from datetime import datetime
from pathlib import Path

import durable_actors as da
import pytest
from durable_actors.cli import audit
from psycopg.types.json import Jsonb
from tests.cli.conftest import Shell

HOSTILE = ["'; drop table durable.receipts; --", "[bold]markup[/bold]", "\x1b[31mred", "a\nb", "%s $1 {}"]


def failed(shell: Shell, **columns: object) -> int:
    return shell.add(status="failed", **columns)


def test_retry_says_who_and_why(shell: Shell):
    number, other = failed(shell), failed(shell)
    shell.ok("retry", number, "--by", "ada", "--reason", "the bank is back", "--idempotency-key", "k")
    shell.ok("retry", other)
    newest, oldest = shell.json("audit")["receipts"]
    assert (newest["target"], newest["by"]) == (str(other), getpass.getuser())
    assert (newest["reason"], newest["idempotency_key"], newest["data"]) == (None, None, {})
    assert datetime.fromisoformat(oldest.pop("at")).tzinfo is not None
    assert oldest.pop("id") < newest["id"]
    assert oldest == {
        "command": "retry", "scope": "instance", "target": str(number), "by": "ada", "reason": "the bank is back",
        "idempotency_key": "k", "data": {}, "result": number,
    }  # fmt: skip


def test_a_user_without_a_name(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    def nobody() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    shell.ok("retry", failed(shell))
    assert shell.json("audit")["receipts"][0]["by"] is None


def test_the_same_key_again(shell: Shell):
    number, other = failed(shell), failed(shell)
    for _ in range(2):
        assert shell.ok("retry", number, "--idempotency-key", "k") == f"{number} runs again\n"
        assert shell.json("retry", number, "--idempotency-key", "k") == [
            {"id": number, "retried": True, "reason": None}
        ]
    assert "is runnable" in shell.refused("retry", number, "--idempotency-key", "l")
    assert shell.ok("retry", number, other, "--idempotency-key", "k").splitlines() == [
        f"{number} runs again",
        f"{other} runs again",
    ]
    assert len(shell.json("audit")["receipts"]) == 2


def test_what_is_refused_leaves_no_receipt(shell: Shell):
    done = shell.add(status="done")
    shell.refused("retry", done, 999)
    shell.ok("retry", failed(shell), "--dry-run")
    assert shell.ok("audit") == "no receipts\n"
    assert shell.json("audit") == {"receipts": [], "before": None}


def test_cancelled_ones_can_be_retried_too(shell: Shell):
    number = shell.add(status="cancelled", finished_at="now", request=Jsonb({"kind": "cancel"}))
    assert shell.ok("retry", "--status", "failed") == "no instance matches the filters\n"
    assert shell.ok("retry", "--status", "cancelled") == "retry of 1 instance: 1 done\n"
    assert shell.row(number, "status, request") == ("runnable", None)


def test_bad_words_are_told(shell: Shell):
    number = failed(shell)
    assert "by=''" in shell.refused("retry", number, "--by", "")
    assert "idempotency_key=" in shell.refused("retry", number, "--idempotency-key", "x" * 501)
    assert shell.row(number, "status") == ("failed",)


def test_audit_by_target_by_command_and_in_pages(shell: Shell):
    numbers = [failed(shell, unique_key=f"k{n}".encode()) for n in range(3)]
    numeric = failed(shell, unique_key=b"77")
    for number in (*numbers, numeric):
        shell.ok("retry", number)

    def targets(*arguments: object) -> list[int]:
        return [int(each["target"]) for each in shell.json("audit", *arguments)["receipts"]]

    assert targets() == [numeric, *numbers[::-1]]
    assert targets(numbers[1]) == targets("k1") == [numbers[1]]
    assert targets("--key", "77") == [numeric]
    assert targets("--command", "retry", "--limit", "1") == [numeric]
    assert targets("--command", "rebuild") == []
    assert "'bogus' is not a command that leaves receipts" in shell.refused(
        "audit", "--command", "bogus", code=2
    )
    assert "there is no instance 999" in shell.refused("audit", 999)
    assert targets(shell.add()) == []
    page = shell.json("audit", "--limit", "3")
    assert page["before"] is not None
    assert targets("--before", page["before"]) == [numbers[0]]
    assert f"for older receipts: --before {page['before']}" in shell.run("audit", "--limit", "3").stderr
    assert "no instance has or had the unique key 'x'" in shell.refused("audit", "x")


def test_audit_knows_each_command_that_leaves_a_receipt(shell: Shell):
    """As it is typed, and as receipts have it; those on queues, schedules and limits, too."""
    number = shell.add(eligible_at="tomorrow")
    shell.ok("run-now", number)
    shell.ok("limits", "set", "api", "--rate", "1", "--per", "1m")

    def targets(name: str) -> list[str]:
        return [each["target"] for each in shell.json("audit", "--command", name)["receipts"]]

    assert targets("run-now") == targets("run_now") == targets("run") == [str(number)]
    assert targets("set") == ["api"]
    for file in (Path(da.__file__).parent / "_store" / "sql").glob("*.sql"):
        for name in re.findall(
            r"^\s*select '(\w+)', '(?:instance|queue|schedule|limit)'", file.read_text(), re.MULTILINE
        ):
            targets(name)
    for name in ("put", "backfill", "delete", "clear"):
        assert targets(name) == []


def test_audit_for_people(shell: Shell):
    number = failed(shell)
    shell.ok("retry", number, "--by", "ada", "--reason", "the bank is back", "--idempotency-key", "req-7")
    head, line = shell.ok("audit").splitlines()
    assert head.split() == [
        "id", "at", "command", "target", "by", "reason", "idempotency", "key", "data", "result",
    ]  # fmt: skip
    assert re.search(rf"retry +{number} +ada +the bank is back +req-7 +{number}$", line.rstrip())
    shell.conn.execute(
        "insert into durable.receipts (command, scope, target, data) values ('pause', 'queue', 'mail', '{\"a\": 1}')"
    )
    assert re.search(r'pause +queue mail +\{"a": 1\}', shell.ok("audit", "--limit", "1"))


def test_a_bulk_is_two_lines_however_many_instances_it_had(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    """One of its instances' receipts, and its own, which tells the filter and the result."""
    monkeypatch.setattr(audit, "PAGE", 4)
    shell.ok("retry", failed(shell))
    numbers = [failed(shell, last_error="X") for _ in range(7)]
    shell.ok("retry", "--error", "X", "--reason", "mended")
    shell.ok("cancel", numbers[0])
    bulk = shell.json("audit", "--command", "retry", "--limit", "8")["receipts"][-1]["id"]
    lines = [" ".join(line.split()[2:5]) for line in shell.ok("audit").splitlines()[1:]]
    assert lines == [
        f"cancel {numbers[0]} {getpass.getuser()}",
        "retry 7 instances",
        "retry all error=X",
        f"retry {numbers[0] - 1} {getpass.getuser()}",
    ]
    assert f"7 instances of bulk {bulk}" in shell.ok("audit")
    paged = shell.run("audit", "--limit", "2")
    assert (len(paged.stdout.splitlines()), f"--before {bulk + 1}" in paged.stderr) == (3, True)
    assert "all error=X" in shell.ok("audit", "--before", bulk + 1, "--limit", "1")
    assert len(shell.json("audit", "--command", "retry")["receipts"]) == 9
    assert "of bulk" not in shell.ok("audit", numbers[3])


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_data_is_shown_as_data(shell: Shell, text: str):
    number = failed(shell)
    shell.ok("retry", number, "--by", text, "--reason", text, "--idempotency-key", text)
    request = Jsonb({"kind": text, "by": text, "reason": text, "at": text})
    shell.conn.execute("update durable.gen_durable set request = %s", [request])
    for shown in (shell.ok("audit"), shell.ok("show", number)):
        assert "\x1b" not in shown
        assert text.replace("\n", "\\n").replace("\x1b", "\\x1b") in shown


# -- show


def test_show_tells_the_last_commands(shell: Shell):
    number = failed(shell)
    for count in range(7):
        shell.ok("retry", number, "--by", "ada", "--reason", f"try {count}")
        shell.conn.execute("update durable.gen_durable set status = 'failed', finished_at = now()")
    told = [line for line in shell.ok("show", number).splitlines() if line.startswith("command ")]
    assert [re.sub(r"\d.* ago", "now", line) for line in told] == [
        f"command    retry by ada now: try {count}" for count in range(2, 7)
    ]
    found = shell.json("show", number)["receipts"]
    assert [each["reason"] for each in found] == [f"try {count}" for count in range(6, 1, -1)]
    assert shell.json("show", shell.add())["receipts"] == []


def test_show_tells_of_a_pending_request(shell: Shell):
    shell.node("n:1", queues={"default": 5}, machines=["shop:Checkout/1"])
    number = shell.add(status="executing")
    shell.conn.execute(
        "update durable.gen_durable set request = jsonb_build_object('kind', 'cancel', 'by', 'ada',"
        " 'reason', 'wrong order', 'at', durable.now() - interval '3 s')"
    )
    lines = shell.ok("show", number).splitlines()
    thread = "(a step in a thread runs to its end first)"
    assert [re.sub(r"\d\.\d s", "3 s", line) for line in lines[-2:]] == [
        "request    cancel requested by ada 3 s ago: wrong order",
        f"why        it is running step 'charge' on n:1; cancel requested by ada 3 s ago {thread}",
    ]
    found = shell.json("show", number)
    assert (found["request"]["kind"], found["request"]["by"]) == ("cancel", "ada")
    assert 3 <= found["requested_ago"] < 60
    shell.conn.execute('update durable.gen_durable set request = \'{"kind": "cancel"}\'')
    assert shell.json("show", number)["why"].endswith(
        "; cancel requested (a step in a thread runs to its end first)"
    )
    shell.conn.execute("update durable.gen_durable set request = '[7]'")
    assert shell.json("show", number)["request"] is None
