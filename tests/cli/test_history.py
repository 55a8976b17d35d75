"""`history`, `verify`, `rebuild` and `recover` on the command line."""

from __future__ import annotations

import json

import durable_actors as da
import psycopg
import pytest
import trio
from tests.cli.conftest import Shell


@pytest.fixture
def order(shell: Shell, durable_dsn: str) -> int:
    """An order that failed once and is done, recorded in full."""

    class Order(da.Machine, name="cli:order", journal="full"):
        @da.step(initial=True)
        async def begin(self, ctx: da.Context) -> da.Outcome:
            return da.Next(self.ship, {"n": 1})

        @da.step
        async def ship(self, ctx: da.Context) -> da.Outcome:
            if not ctx.attempt:
                raise ValueError("no stock")
            return da.Done("shipped")

        async def handle(self, error: Exception, ctx: da.Context) -> da.Outcome:
            return da.Retry()

    async def run() -> int:
        async with da.open_engine(dsn=durable_dsn, queues={"default": 2}):
            number = await da.insert(Order, unique_key="order:1")
            await da.result(number, timeout=20)
            return number

    return trio.run(run)


def test_what_happened(shell: Shell, order: int):
    lines = shell.ok("history", order).splitlines()
    words = [line.split()[2] for line in lines if line.startswith("+")]
    assert words == ["started", "claimed", "next", "retry", "claimed", "done"]
    retry = next(line for line in lines if " retry " in line)
    assert "ship" in retry
    assert "run 1" in retry
    assert "ValueError: no stock" in retry
    assert shell.ok("history", "order:1") == "\n".join(lines) + "\n"


def test_tracebacks(shell: Shell, order: int):
    assert "Traceback" not in shell.ok("history", order)
    assert 'raise ValueError("no stock")' in shell.ok("history", order, "--traceback")


def test_pages(shell: Shell, order: int):
    first = shell.json("history", order, "--limit", "4")
    assert [each["rev"] for each in first["records"]] == [1, 2, 3, 4]
    assert first["after"] == 4
    rest = shell.json("history", order, "--after", "4")
    assert [each["rev"] for each in rest["records"]] == [5, 6]
    assert rest["after"] is None
    assert shell.ok("history", order, "--after", "6") == "no records after revision 6\n"


def test_a_damaged_row_is_found_and_rebuilt(shell: Shell, order: int, durable_dsn: str):
    assert shell.ok("verify", order) == "1 instance checked, 0 problems\n"
    with psycopg.connect(durable_dsn) as db:
        db.execute("update durable.gen_durable set result = '\"stolen\"' where id = %s", [order])
    result = shell.run("verify")
    assert result.exit_code == 1
    assert "divergence" in result.output
    assert "1 problem" in result.output
    assert (
        shell.ok("rebuild", order, "--reason", "edited by hand")
        == f"instance {order} is as its journal says; corrected: result\n"
    )
    assert shell.ok("rebuild", order) == f"instance {order} is as its journal says; nothing differed\n"
    assert "snapshot  the row was wrong or gone" in shell.ok("history", order)
    assert shell.json("verify")["problems"] == []
    assert shell.json("show", order)["result"] == "shipped"
    assert shell.json("audit")["receipts"][-1]["reason"] == "edited by hand"


def test_a_history_with_damage_is_shown_as_far_as_it_can_be_read(shell: Shell, order: int):
    shell.conn.execute("set session_replication_role = replica")
    shell.conn.execute("delete from durable.journal where rev = 2")
    shell.conn.execute("update durable.journal set kind = 'flew' where rev = 4")
    result = shell.run("history", order)
    assert result.exit_code == 1
    for told in (
        "started",
        "┆ revision 2 is missing",
        "┆ revision 4 is damaged: unknown kind 'flew'",
        "done",
    ):
        assert told in result.stdout
    assert f"instance {order}, revision 2: missing" in result.stderr
    result = shell.run("history", order, "--json")
    assert (result.exit_code, list(json.loads(result.stdout)["damaged"])) == (1, ["2", "4"])
    shell.conn.execute("delete from durable.journal where rev in (1, 6)")
    result = shell.run("history", order)
    assert result.exit_code == 1
    for told in ("┆ revision 1 is missing", "┆ revision 6 is missing"):
        assert told in result.stdout
    assert "anomalies" not in shell.refused("rebuild", order)
    assert shell.ok("accept", order, "--reason", "it is right") == f"instance {order} is accepted as it is\n"
    for told in ("the row was accepted as it is", "┆ revision 1 is missing", "┆ revision 4 is damaged"):
        assert told in shell.ok("history", order)
    assert [*json.loads(shell.ok("history", order, "--json"))["accepted"]] == ["1", "4"]
    assert "┆ revision 1 is missing" in shell.ok("history", order, "--limit", 1), "accepted on a later page"
    assert shell.ok("verify", order) == "1 instance checked, 0 problems\n"


def test_limits_and_names_that_do_not_exist(shell: Shell, order: int):
    assert "from 1 to 10000" in shell.refused("history", order, "--limit", 10_001, code=2)
    assert "no instance of machine 'nosuch' has a journal" in shell.refused("verify", "--machine", "nosuch")


DAMAGE = "update durable.journal set kind = 'flew' where rev = 3"


def test_a_damaged_record_is_named(shell: Shell, order: int, durable_dsn: str):
    with psycopg.connect(durable_dsn) as db:
        db.execute("set local durable_actors.journal_door = 'open'")
        db.execute(DAMAGE)
    for verb in ("history", "rebuild"):
        told = shell.refused(verb, order)
        assert f"instance {order}, revision 3" in told
        assert "flew" in told
    result = shell.run("verify", "--json")
    assert result.exit_code == 1
    [problem] = json.loads(result.stdout)["problems"]
    assert (problem["instance_id"], problem["reason"], problem["rev"]) == (order, "invalid_record", 3)
    assert "flew" in problem["detail"]


def test_nothing_to_recover(shell: Shell, order: int):
    assert shell.ok("recover") == "nothing to correct\n"
    assert set(shell.json("recover")) == {"woken", "recounted", "offered", "reaped", "told"}
    assert shell.ok("recover", "--dry-run") == "nothing to correct\n"


def test_what_would_be_recovered(shell: Shell):
    stuck = shell.add(hold=1, partition_key="k")
    for _ in range(2):
        assert shell.ok("recover", "--dry-run") == f"would be offered: {stuck}\n"
    assert shell.json("recover", "--dry-run")["offered"] == [stuck]
    assert shell.ok("recover") == f"offered: {stuck}\n"
    assert shell.ok("recover", "--dry-run") == "nothing to correct\n"


def test_nobody(shell: Shell):
    for verb in ("history", "verify", "rebuild"):
        assert "99" in shell.refused(verb, "99")


def test_no_history(shell: Shell):
    assert shell.ok("history", shell.add()) == "no records: its journal is off\n"
    told = shell.ok("history", shell.add(journal=1))
    assert told == "no records: its journal records only failed attempts\n"


def test_json_is_one_document(shell: Shell, order: int):
    for verb in ("history", "verify"):
        assert json.loads(shell.ok(verb, order, "--json"))


def test_problems_are_told_in_few_words(shell: Shell, order: int):
    shell.conn.execute("set session_replication_role = replica")
    shell.conn.execute("update durable.journal set claim_id = gen_random_uuid() where rev = 3")
    assert len(json.loads(shell.run("verify", "--json").stdout)["problems"]) > 2
    told = shell.run("verify").stdout
    assert told.count(" anomaly ") == 1
    assert "anomalies after it" in told
    assert "if the row is right now: durable-actors accept ID" in told
    waiting = shell.add(journal=4, status="awaiting_signal", awaits=["go"], await_deadline="2030-01-01")
    shell.ok("accept", waiting)
    shell.conn.execute(
        "update durable.gen_durable set await_deadline = '2031-01-01' where id = %s", [waiting]
    )
    told = shell.run("verify", waiting).stdout
    assert (
        "await_deadline is '2031-01-01T00:00:00+00:00', the records say '2030-01-01T00:00:00+00:00'" in told
    )
    revived = shell.add(journal=4)
    shell.ok("accept", revived)
    shell.conn.execute("update durable.gen_durable set rev = rev + 1 where id = %s", [revived])
    shell.conn.execute(
        "select durable.note(id, rev, 'revived', step, step, visit, attempt, 0) from durable.gen_durable where id = %s",
        [revived],
    )
    assert "run_revived is malformed_entry: the run has not ended" in shell.run("verify", revived).stdout
