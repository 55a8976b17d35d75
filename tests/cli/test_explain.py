"""`why`: one sentence, the facts under it, what one can do."""

from __future__ import annotations

from tests.cli.conftest import Shell


def test_why_tells_who_holds_the_key(shell: Shell):
    shell.node("n:1", queues={"default": 5}, machines=["shop:Checkout/1"])
    running = shell.add(partition_key="k", status="executing", locked_by="n:1")
    waiting = shell.add(partition_key="k", hold=1, unique_key=b"order:1")
    first, second, *lines = shell.ok("why", "order:1").splitlines()
    assert first == f"why        it waits for partition key 'k', which instance {running} holds on n:1"
    assert second == "reason     waiting_for_key"
    assert f"instance   {waiting} of shop:Checkout/1, step charge, queue default" in lines
    assert f"waits for  instance {running} holds partition key 'k' on n:1" in lines
    assert f"you can    see why instance {running} has not ended: durable-actors why {running}" in lines
    [facts] = [line for line in lines if line.startswith("facts ")]
    assert "partition_key k, rev 1, visit 1, hold held, eligible_at 20" in facts


def test_the_json_form(shell: Shell):
    parent = shell.add(status="awaiting_children", children_pending=1, children_total=1)
    child = shell.add(parent_id=parent, barrier=1, status="awaiting_signal", awaits=["paid"])
    found = shell.json("why", parent)
    assert set(found) == {
        "id", "reason", "summary", "since", "until", "blockers", "next_actions", "evidence",
    }  # fmt: skip
    assert (found["id"], found["reason"]) == (parent, "awaiting_children")
    [blocker] = found["blockers"]
    assert (blocker["kind"], blocker["id"], blocker["name"]) == ("child", child, str(child))
    assert blocker["because"]["blockers"][0]["name"] == "paid"
    assert blocker["because"]["next_actions"][0] == {
        "text": "send it a signal named 'paid'",
        "command": f"durable-actors signal {child} paid",
        "call": f"durable_actors.signal({child}, 'paid')",
    }
    assert found["evidence"]["children"] == {"awaiting_signal": 1}
    assert shell.json("show", parent)["explanation"] == found
    assert "waits for    no signal named 'paid' has arrived" in shell.ok("why", parent)


def test_hostile_names_stay_on_their_line(shell: Shell):
    number = shell.add(queue="a\nb\x1b[31m", step="[bold]x[/bold]")
    lines = shell.ok("why", number).splitlines()
    labels = {"why", "reason", "instance", "since", "waits for", "facts", "you can"}
    assert {line[:10].strip() for line in lines} == labels
    assert not [line for line in lines if "\x1b" in line]
    assert "step [bold]x[/bold]" in lines[2]


def test_why_refuses(shell: Shell):
    assert shell.refused("why", 7) == "durable-actors: there is no instance 7\n"
    assert "no instance has or had the unique key 'k'" in shell.refused("why", "k")
