"""`queues`, `nodes`, `top`, `migrate`."""

from __future__ import annotations

import json

import durable_actors as da
from tests.cli.conftest import Shell

MACHINE = "shop:Checkout/1"


def test_queues_counts(shell: Shell):
    shell.node("n:1", queues={"a": 3, "idle": 2}, machines=[MACHINE])
    shell.node("n:2", queues={"a": 4}, machines=[MACHINE])
    shell.node("n:3", queues={"a": 99}, machines=[MACHINE], alive=False)
    shell.add(queue="a", eligible_at="yesterday")
    shell.add(queue="a", eligible_at="tomorrow")
    shell.add(queue="a", hold=1, partition_key="k")
    shell.add(queue="a", hold=2)
    shell.add(queue="a", status="executing")
    shell.add(queue="a", status="awaiting_signal", awaits=["x"])
    shell.add(queue="a", status="awaiting_children")
    shell.add(queue="a", status="done")
    shell.add(queue="a", status="cancelled")
    shell.add(queue="b", status="failed")
    found = {each.pop("queue"): each for each in shell.json("queues")}
    assert found["a"].pop("oldest_due") > 3600
    assert found["a"] == {
        "due": 1,
        "scheduled": 1,
        "held": 1,
        "shelved": 1,
        "throttled": 0,
        "paused": 0,
        "asks": 0,
        "pauses": [],
        "executing": 1,
        "awaiting": 2,
        "done": 1,
        "failed": 0,
        "cancelled": 1,
        "nodes": 2,
        "slots": 7,
        "unknown": [],
        "fair": None,
    }
    assert (found["b"]["failed"], found["b"]["nodes"], found["idle"]["slots"]) == (1, 0, 2)
    quick = {each["queue"]: each for each in shell.json("queues", "--quick")}
    assert quick.keys() == {"a", "idle"}
    assert (quick["a"]["held"], quick["a"]["done"], quick["a"]["awaiting"]) == (1, None, None)
    lines = shell.ok("queues").splitlines()
    assert [line.split()[0] for line in lines] == ["queue", "a", "b", "idle"]
    assert "cancelled" in lines[0]


def test_queues_tells_what_nobody_knows(shell: Shell):
    shell.node("n:1", queues={"a": 3}, machines=[MACHINE], steps={MACHINE: ["start"]})
    shell.node("n:2", queues={"b": 3}, machines=[MACHINE], steps={MACHINE: ["start", "ship"]})
    shell.add(queue="a", hold=2, step="ship")
    shell.add(queue="a", hold=2, step="start")
    shell.add(queue="a", hold=2, fsm="__main__:Order", step="start")
    shell.add(queue="a", hold=2, fsm="odd\x1fname", step="start")
    shell.conn.execute("update durable.gen_durable set shelved_step = step")
    found = {each["queue"]: each for each in shell.json("queues")}
    known = [
        "step 'start' of __main__:Order/1",
        "'odd\\x1fname\\x1f1\\x1fstart'",
        f"step 'ship' of {MACHINE}",
    ]
    assert (found["a"]["unknown"], found["b"]["unknown"]) == (known, [])
    told = shell.run("queues").stderr
    assert f"queue 'a': no live node that serves it knows step 'ship' of {MACHINE}\n" in told
    assert told.count("\n") == 3


def test_nothing_there(shell: Shell):
    assert shell.ok("queues") == "no queues: no work is waiting or running, and no node is alive\n"
    assert shell.ok("nodes") == "no node is alive (--all shows stopped and lost nodes)\n"
    assert shell.ok("nodes", "--all") == "no node is alive\n"
    assert shell.json("nodes") == []


def test_nodes(shell: Shell):
    shell.node("n:1", queues={"a": 3}, machines=[MACHINE])
    shell.node("n:2", queues={"a": 3}, machines=[MACHINE], alive=False)
    shell.node("n:3", queues={}, machines=[], alive=False)
    shell.conn.execute("update durable.nodes set stopped_at = now() where incarnation = 'n:3'")
    shell.add(status="executing", locked_by="n:1")
    shell.add(status="executing", locked_by="n:2")
    shell.add(status="executing", locked_by="forgotten:9")
    found = [(each["incarnation"], each["state"], each["claims"]) for each in shell.json("nodes", "--all")]
    assert sorted(found) == [
        ("forgotten:9", "lost", 1),
        ("n:1", "alive", 1),
        ("n:2", "lost", 1),
        ("n:3", "stopped", 0),
    ]
    assert {each["incarnation"] for each in shell.json("nodes")} == {"n:1", "n:2", "forgotten:9"}
    [line] = [line for line in shell.ok("nodes").splitlines() if line.startswith("n:1")]
    assert line.split()[:5] == ["n:1", "alive", "1", "a=3", "7"]


def test_nodes_tells_what_an_older_node_ignores(shell: Shell):
    shell.node("new:1", queues={}, machines=[], version=da.__version__)
    assert not shell.run("nodes").stderr
    shell.node("old:1", queues={}, machines=[], version="0.1.0.dev0")
    shell.node("gone:1", queues={}, machines=[], version="0.1.0.dev0", alive=False)
    result = shell.run("nodes", "--all")
    versions = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "0.1.0.dev0" in versions["old:1"]
    assert da.__version__ in versions["new:1"]
    assert result.stderr.startswith("node old:1 runs 0.1.0.dev0, which ignores: commands to running steps, ")
    assert result.stderr.count("\n") == 1
    found = {each["incarnation"]: each["ignores"] for each in shell.json("nodes", "--all")}
    assert (found["new:1"], found["gone:1"], found["old:1"][0]) == ([], [], "commands to running steps")


def test_another_schema_has_its_own_nodes(shell: Shell):
    shell.node("n:1", queues={"a": 3}, machines=[MACHINE])
    shell.ok("migrate", "--schema", "other")
    assert shell.json("nodes", "--schema", "other", "--all") == []


def test_top_without_a_terminal_prints_once(shell: Shell):
    shell.node("n:1", queues={"a": 3}, machines=[MACHINE])
    shell.add(queue="a")
    text = shell.ok("top")
    assert "schema durable" in text
    assert "inserts –/s" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("a ", "n:1 "))] == ["a", "n:1"]


def test_top_as_json_lines_with_rates(shell: Shell):
    lines = shell.ok("top", "--json", "--count", "2", "--interval", "100ms").splitlines()
    first, second = map(json.loads, lines)
    assert first["inserts"] is None
    assert second["inserts"] >= 0
    assert first["queues"] == []


def test_top_refuses(shell: Shell):
    assert "at least 0.1 seconds" in shell.refused("top", "--interval", "0", code=2)
    assert "Invalid value" in shell.refused("top", "--count", "0", code=2)


def test_migrate_tells_that_a_newer_release_was_there(shell: Shell):
    latest = shell.json("migrate")["latest"]
    shell.conn.execute(
        "insert into durable.migrations (version, name, works_with) values (%s, 'next', %s)",
        [latest + 1, latest],
    )
    told = f'schema "durable" is at version {latest + 1}, this durable_actors ({da.__version__}) knows {latest}: '
    for arguments in (["migrate"], ["migrate", "--check"]):
        assert shell.ok(*arguments).startswith(told)
    assert shell.json("migrate", "--check") == {
        "schema": "durable",
        "version": latest + 1,
        "latest": latest,
        "works_with": latest,
        "pending": [],
    }
    shell.conn.execute("update durable.migrations set works_with = version where version = %s", [latest + 1])
    for arguments in (["migrate"], ["nodes"]):
        assert f"and needs a package of version {latest + 1} or newer" in shell.refused(*arguments)


def test_only_due_rows_have_an_age(shell: Shell):
    """A row on the shelf, or behind a sibling, is not due: nobody waits for a slot."""
    shell.add(queue="mail", hold=2, shelved_step="s", eligible_at="2020-01-01")
    shell.add(queue="mail", hold=3, limited_by="smtp", rate_limit="smtp", eligible_at="2020-01-01")
    shell.add(queue="mail", hold=1, partition_key="k", eligible_at="2020-01-01")
    [found] = shell.json("queues")
    assert (found["due"], found["held"], found["shelved"], found["oldest_due"]) == (0, 1, 1, None)
    assert found["throttled"] == 1


def test_the_queue_of_commands_is_shown_while_it_has_work(shell: Shell):
    shell.node("n:1", queues={"q": 3, "durable.ops": 1}, machines=["durable:bulk/1"])
    assert [each["queue"] for each in shell.json("queues", "--quick")] == ["q"]
    assert "durable.ops" not in shell.ok("nodes")
    shell.add(queue="durable.ops", fsm="durable:bulk", step="batch")
    assert [each["queue"] for each in shell.json("queues", "--quick")] == ["durable.ops", "q"]


def test_queues_shows_the_shares_of_a_fair_queue(shell: Shell):
    shell.node("n:1", queues={"a": 3, "b": 1}, machines=[MACHINE], fair=["a"])
    columns = "(fsm, step, queue, fair_key)"
    insert = f"insert into durable.gen_durable {columns} select 'm', 's', 'a', %s from generate_series(1, %s)"
    shell.conn.execute(insert, ["acme", 1200])
    shell.conn.execute(insert, ["blue", 2])
    shell.conn.execute(
        "insert into durable.gen_durable (fsm, step, queue, fair_key, status, claim_id, locked_by, lease_expires_at)"
        " select 'm', 's', 'a', k, 'executing', gen_random_uuid(), 'n:1', now() + interval '1 hour'"
        " from unnest(array['acme', 'blue', 'blue', null]) k"
    )
    assert shell.ok("queues").splitlines()[-1] == (
        "queue a is fair: blue 50% (2 running, 2 waiting) · acme 25% (1 running, 1000+ waiting)"
        " · (no key) 25% (1 running)"
    )
    found = {each["queue"]: each["fair"] for each in shell.json("queues", "--quick")}
    assert found["b"] is None
    assert [(each["key"], each["running"], each["waiting"]) for each in found["a"]] == [
        ("blue", 2, 2), ("acme", 1, 1000), (None, 1, None),
    ]  # fmt: skip
