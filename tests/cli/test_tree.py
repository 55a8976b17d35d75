"""`tree`: the family of an instance, indented."""

from __future__ import annotations

from tests.cli.conftest import Shell


def family(shell: Shell) -> list[int]:
    root = shell.add(status="awaiting_children", children_pending=2, children_total=3)
    first = shell.add(parent_id=root, barrier=2, status="done", finished_at="now")
    second = shell.add(
        parent_id=root, barrier=2, status="awaiting_signal", awaits=["paid"], unique_key=b"order:1"
    )
    third = shell.add(parent_id=second, status="failed", last_error="no\nstock", finished_at="now")
    return [root, first, second, third]


def test_a_family(shell: Shell):
    root, first, second, third = family(shell)
    lines = shell.ok("tree", "order:1").splitlines()
    counts = "[2 children: 1 awaiting_signal, 1 done]"
    assert lines == [
        f"{root} shop:Checkout/1 awaiting_children in charge: waits for 2 more of 3 children {counts}",
        f"├─ {first} shop:Checkout/1 done in charge",
        f"└─ {second} shop:Checkout/1 awaiting_signal in charge: awaits a signal named 'paid' [1 child: 1 failed]",
        f"   └─ {third} shop:Checkout/1 failed in charge: no stock",
    ]


def test_what_is_hidden_is_counted(shell: Shell):
    root, _, second, _ = family(shell)
    lines = shell.ok("tree", root, "--children", "1", "--depth", "1").splitlines()
    assert lines[1].startswith(f"├─ {second} ")
    assert lines[2:] == ["│  └─ … 1 more: 1 failed", "└─ … 1 more: 1 done"]


def test_the_json_form(shell: Shell):
    root, _, second, third = family(shell)
    found = shell.json("tree", second)
    assert (found["target"], found["shown"], found["truncated"]) == (second, 4, False)
    node = found["root"]["children"][1]["children"][0]
    assert (node["id"], node["parent_run"]["id"], node["hidden"], node["counts"]) == (third, second, 0, {})
    assert found["root"]["id"] == root


def test_a_target_that_is_not_there(shell: Shell):
    assert "there is no instance 77" in shell.refused("tree", "77")


def test_hostile_names_stay_on_their_line(shell: Shell):
    root = shell.add(step="[bold]x[/bold]", fsm="a\nb")
    shell.add(parent_id=root, status="failed", last_error="\x1b[31m", finished_at="now")
    lines = shell.ok("tree", root).splitlines()
    assert len(lines) == 2
    assert "a\\nb/1 runnable in [bold]x[/bold]" in lines[0]
    assert "\x1b" not in lines[1]


def test_children_of_a_graph_show_their_keys_and_what_they_come_after(shell: Shell):
    root = shell.add(status="awaiting_children", children_pending=2, children_total=3)
    first = shell.add(parent_id=root, barrier=1, status="done", child_key="fetch\n", links=2)
    second = shell.add(parent_id=root, barrier=1, hold=5, child_key="mail", links=1)
    third = shell.add(parent_id=root, barrier=1)
    shell.conn.execute(
        "insert into durable.graph (id, needs, feeds, waits) values (%s, null, %s, 0), (%s, %s, null, 2)",
        [first, [second], second, [first, *range(1000, 1029)]],
    )
    lines = shell.ok("tree", root).splitlines()
    assert lines[1] == f"├─ {first} shop:Checkout/1 done in charge (key fetch\\n)"
    after = "fetch\\n, 1000, 1001, 1002, 1003, 1004 and 24 more"
    waits = "waits for 2 of 30 instances that it comes after"
    assert lines[2] == f"├─ {second} shop:Checkout/1 runnable in charge: {waits} (key mail) (after {after})"
    assert lines[3] == f"└─ {third} shop:Checkout/1 runnable in charge: is due in queue 'default'"
    node = shell.json("tree", root)["root"]["children"][1]
    assert (node["key"], node["after"][:2], len(node["after"]), node["after_count"]) == (
        "mail",
        [first, 1000],
        20,
        30,
    )
