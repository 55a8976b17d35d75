"""`list`, `show` and `retry`."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb
from tests.cli.conftest import Shell

HOSTILE = ["'; drop table durable.gen_durable; --", "[bold]markup[/bold]", "\x1b[31mred", "a\nb", "%s $1 {}"]


def ids(found: dict) -> list[int]:
    return [each["id"] for each in found["instances"]]


def test_list_is_newest_first_and_filters(shell: Shell):
    a = shell.add(queue="q")
    b = shell.add(queue="q", status="failed", last_error="why\nnot")
    c = shell.add(fsm="other", unique_key=b"k")
    assert ids(shell.json("list")) == [c, b, a]
    assert ids(shell.json("list", "--status", "failed")) == [b]
    assert ids(shell.json("list", "--machine", "other")) == [c]
    assert ids(shell.json("list", "--queue", "q")) == [b, a]
    assert ids(shell.json("list", "--key", "k")) == [c]
    assert ids(shell.json("list", "--key", "k", "--status", "done")) == []
    assert ids(shell.json("list", "--queue", "q", "--status", "failed", "--machine", "shop:Checkout")) == [b]


def test_a_child_that_waits_for_others_is_shown_with_its_name(shell: Shell):
    before = shell.add(child_key="fetch", links=2)
    after = shell.add(child_key="chart", links=1, hold=5)
    shell.conn.execute("insert into durable.graph (id, needs, waits) values (%s, %s, 1)", [after, [before]])
    head, line, _ = shell.ok("list").splitlines()
    assert "child" in head.split()
    assert "chart" in line
    assert "waits for 1 before it" in line
    assert [each["key"] for each in shell.json("list")["instances"]] == ["chart", "fetch"]
    assert "waits for 1 before it" in shell.ok("show", str(after))
    assert "waits for instances that it comes after" in shell.ok("run-now", str(after))


def test_tags_and_meta(shell: Shell):
    number = shell.add(tags=["urgent", "eu"], meta=Jsonb({"who": "ada"}))
    other = shell.add(tags=["eu"])
    shell.add()
    assert ids(shell.json("list", "--tag", "eu")) == [other, number]
    assert ids(shell.json("list", "--tag", "eu", "--tag", "urgent")) == [number]
    assert shell.json("list", "--tag", "urgent")["instances"][0]["meta"] == {"who": "ada"}
    head, *lines = shell.ok("list").splitlines()
    assert "tags" in head.split()
    assert "urgent, eu" in lines[-1]
    assert "tags" not in shell.ok("list", "--limit", "1").splitlines()[0].split()
    shown = shell.ok("show", str(number))
    assert "tags       urgent, eu" in shown
    assert 'meta       {"who": "ada"}' in shown


def test_list_pages(shell: Shell):
    numbers = [shell.add() for _ in range(5)]
    first = shell.json("list", "--limit", "2")
    assert (ids(first), first["before"]) == (numbers[:2:-1], numbers[3])
    second = shell.json("list", "--limit", "2", "--before", first["before"])
    third = shell.json("list", "--limit", "2", "--before", second["before"])
    assert ids(second) + ids(third) == numbers[2::-1]
    assert third["before"] is None


def test_list_gives_up_at_its_depth_and_says_where_to_go_on(shell: Shell):
    wanted = shell.add(queue="rare")
    numbers = [shell.add() for _ in range(4)]
    result = shell.run("list", "--queue", "rare", "--depth", "3")
    assert "no instances" in result.stdout
    assert f"3 rows read; for older instances: --before {numbers[1]}" in result.stderr
    assert ids(shell.json("list", "--queue", "rare", "--before", numbers[1])) == [wanted]


def test_list_for_people(shell: Shell):
    assert shell.ok("list") == "no instances\n"
    number = shell.add(status="failed", last_error="first\nsecond", unique_key=b"\xff\x00")
    head, line = shell.ok("list").splitlines()
    assert head.split() == ["id", "machine", "step", "status", "queue", "runs", "key", "updated", "error"]
    assert line.split()[:5] == [str(number), "shop:Checkout/1", "charge", "failed", "default"]
    assert "\\xff00" in line
    assert "first\\nsecond" in line


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_data_is_shown_as_data(shell: Shell, text: str):
    number = shell.add(queue=text, fsm=text, step=text, last_error=text, unique_key=text.encode())
    for shown in (shell.ok("list", "--queue", text), shell.ok("show", text), shell.ok("queues")):
        assert "\x1b" not in shown
        assert text.replace("\n", "\\n").replace("\x1b", "\\x1b") in shown
    assert ids(shell.json("list", "--machine", text, "--queue", text, "--key", text)) == [number]


@pytest.mark.parametrize(
    "arguments",
    [["--status", "lost"], ["--limit", "0"], ["--limit", "many"], ["--before", "-1"], ["--depth", "0"]],
    ids=str,
)
def test_list_refuses(shell: Shell, arguments: list[str]):
    assert "Error: Invalid value" in shell.refused("list", *arguments, code=2)


def test_show_everything(shell: Shell):
    number = shell.add(
        unique_key=b"order:1",
        partition_key="p",
        state='{"order": 1}',
        status="awaiting_signal",
        awaits=["a", "b"],
    )
    shell.add(parent_id=number, status="done", result='{"x": 1}')
    shell.ok("signal", number, "noise")
    found = shell.json("show", "order:1")
    assert found["id"] == number
    assert found["unread"] == {"noise": 1}
    assert found["children"] == {"done": 1}
    assert found["awaits"] == ["a", "b"]
    assert found["state"] == {"order": 1}
    assert found["why"] == "it awaits a signal named 'a', 'b', then runs step 'charge'"
    text = shell.ok("show", number)
    for line in (
        f"instance   {number} of shop:Checkout/1",
        "status     awaiting_signal",
        "key        order:1",
        "inbox      1 × noise",
        "children   1 done",
        'state      {"order": 1}',
        "why        it awaits a signal named 'a', 'b', then runs step 'charge'",
    ):
        assert line in text.splitlines()


def test_runs_are_counted_as_people_count(shell: Shell):
    """`attempt` counts from 0 and is what programs read; after three runs people read 3."""
    failed = shell.add(status="failed", attempt=2, last_error="x", interruptions=1)
    waiting = shell.add(attempt=2)
    fresh = shell.add()
    once = shell.add(status="done")
    rows = {line.split()[0]: line.split()[5] for line in shell.ok("list").splitlines()[1:]}
    assert rows == {str(failed): "3", str(waiting): "2", str(fresh): "0", str(once): "1"}
    said = shell.ok("show", failed).splitlines()
    assert "step       charge, visit 1, 3 runs" in said
    assert "drained    1 run ended by a drain" in said
    assert "step       charge, visit 1, 1 run" in shell.ok("show", once).splitlines()
    assert (shell.json("show", failed)["attempt"], shell.json("show", failed)["interruptions"]) == (2, 1)


def test_show_has_the_traceback_and_lists_have_not(shell: Shell):
    number = shell.add(
        status="failed", last_error="x", error_type="T", traceback="Traceback:\n  here\x1b[1m\nT: x"
    )
    assert "  Traceback:\n    here\\x1b[1m\n  T: x\n" in shell.ok("show", number)
    assert "here" not in shell.ok("list")
    [row] = shell.json("list")["instances"]
    assert (row["traceback"], row["error_type"]) == (None, "T")
    assert shell.json("show", number)["traceback"].startswith("Traceback:")


def test_show_says_who_holds_the_key(shell: Shell):
    shell.node("n:1", queues={"default": 5}, machines=["shop:Checkout/1"])
    running = shell.add(partition_key="k", status="executing", locked_by="n:1")
    waiting = shell.add(partition_key="k", hold=1)
    assert shell.json("show", running)["why"] == "it is running step 'charge' on n:1"
    expected = f"it waits for partition key 'k', which instance {running} holds on n:1"
    assert shell.json("show", waiting)["why"] == expected


def test_show_refuses(shell: Shell):
    assert shell.refused("show", 7) == "durable-actors: there is no instance 7\n"
    assert "no instance has or had the unique key 'k'" in shell.refused("show", "k")
    assert "Missing argument" in shell.refused("show", code=2)


def test_retry_lets_failed_ones_run_again(shell: Shell):
    failed = shell.add(status="failed", attempt=3, crashes=2, visit=5, last_error="x", step="ship")
    assert shell.ok("retry", failed) == f"{failed} runs again\n"
    columns = "status, step, attempt, crashes, visit, finished_at, hold, eligible_at <= now(), claim_id"
    assert shell.row(failed, columns) == ("runnable", "ship", 0, 0, 5, None, 0, True, None)


def test_retry_refuses_what_is_not_failed_and_does_the_rest(shell: Shell):
    failed, done, live = shell.add(status="failed"), shell.add(status="done"), shell.add()
    result = shell.run("retry", done, failed, live, 999, failed)
    assert result.exit_code == 1
    assert result.stdout == f"{failed} runs again\n"
    assert result.stderr.splitlines() == [
        f"durable-actors: not retried: instance {done} is done, and only a failed or cancelled one can be retried",
        f"durable-actors: not retried: instance {live} is runnable, and only a failed or cancelled one can be retried",
        "durable-actors: not retried: there is no instance 999",
    ]
    assert shell.row(done, "status") == ("done",)


def test_retry_refuses_an_occupied_key(shell: Shell):
    failed = shell.add(status="failed", unique_key=b"k")
    holder = shell.add(unique_key=b"k")
    assert f"its unique key 'k' is occupied by instance {holder}" in shell.refused("retry", failed)
    assert shell.row(failed, "status") == ("failed",)


def test_retry_as_json(shell: Shell):
    failed = shell.add(status="failed")
    assert shell.json("retry", failed) == [{"id": failed, "retried": True, "reason": None}]


def test_a_retried_child_is_waited_for_again(shell: Shell):
    """Its end was counted at the barrier; a second end must not be counted on top."""
    parent = shell.add(
        status="awaiting_children", visit=3, children_pending=1, children_total=2, await_step="ship"
    )
    child = shell.add(status="failed", parent_id=parent, barrier=3)
    shell.ok("retry", child)
    assert shell.row(parent, "status, children_pending") == ("awaiting_children", 2)
    stray = shell.add(status="failed", parent_id=parent, barrier=2)  # of a barrier that has opened
    shell.ok("retry", stray)
    assert shell.row(parent, "children_pending") == (2,)


@pytest.mark.parametrize("limit", ["x", "0", "10001", "1.5"])
def test_a_number_that_is_none_is_told_with_its_bounds(shell: Shell, limit: str):
    said = shell.refused("list", "--limit", limit, code=2)
    assert f"'--limit': '{limit}' is not a whole number from 1 to 10000" in said


def test_list_by_parent_step_and_error(shell: Shell):
    parent = shell.add()
    a = shell.add(parent_id=parent, status="failed", last_error="no such host")
    b = shell.add(parent_id=parent, step="other")
    assert ids(shell.json("list", "--parent", parent)) == [b, a]
    assert ids(shell.json("list", "--parent", parent, "--status", "failed")) == [a]
    assert ids(shell.json("list", "--step", "other")) == [b]
    assert ids(shell.json("list", "--error", "such host")) == [a]
    assert ids(shell.json("list", "--older-than", "1h")) == []
    assert "not by both" in shell.refused("list", "--parent", parent, "--key", "k")


def test_retry_by_unique_key(shell: Shell):
    failed = shell.add(status="failed", unique_key=b"order:1")
    numeric = shell.add(status="failed", unique_key=b"77")
    assert shell.ok("retry", "order:1") == f"{failed} runs again\n"
    assert shell.ok("retry", "--key", "77") == f"{numeric} runs again\n"
    assert "no instance has or had the unique key 'x'" in shell.refused("retry", "x")
