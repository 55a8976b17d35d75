"""`durable-actors schedules`: what it lists, and the commands on one."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._scheduling.schedule import Definition
from durable_actors._store.commands import Command
from durable_actors._store.dialogues import run_dialogue
from durable_actors._store.schedule_commands import putting
from durable_actors._store.schedules import ScheduledPlan
from tests.cli.conftest import Shell
from tests.store.kit import plan


@pytest.fixture
def nightly(shell: Shell, durable_dsn: str) -> Shell:
    """A schedule by the name `nightly`, and one that has ended."""

    async def put() -> None:
        conn = await PgConn.open(durable_dsn)
        rule = Definition(cron="0 3 * * *", tz="Europe/Berlin")
        await run_dialogue(conn, putting("durable", ScheduledPlan("nightly", rule, plan()), Command()))
        over = Definition(every=60.0, ends=datetime(2020, 1, 1, tzinfo=UTC))
        await run_dialogue(conn, putting("durable", ScheduledPlan("over", over, plan()), Command()))
        conn.close()

    trio.run(put)
    return shell


def test_nothing(shell: Shell) -> None:
    assert "no schedules" in shell.ok("schedules")
    assert shell.json("schedules") == []
    assert "there is no schedule 'x'" in shell.refused("schedules", "pause", "x")


def test_the_list(nightly: Shell) -> None:
    shown = nightly.ok("schedules")
    assert "nightly  active  0 3 * * * Europe/Berlin → m" in shown
    assert "over  ended  every 60 s → m" in shown
    assert "03:00:00 CE" in shown
    found = {each["name"]: each for each in nightly.json("schedules")}
    assert (found["nightly"]["state"], len(found["nightly"]["next"])) == ("active", 5)
    assert found["over"]["next"] == []


def test_put(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import durable_actors as da\n\n@da.job(name='cli:report')\nasync def report(args: int) -> None: ...\n"
    (tmp_path / "reports_of_test_put.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    machine = ("weekly", "reports_of_test_put:report")
    said = shell.ok("schedules", "put", *machine, "--cron", "0 9 * * 1", "--tz", "Europe/Berlin", "--args", 3)
    assert said == "schedule weekly is stored\n"
    options = ("--queue", "slow", "--overlap", "allow", "--missed", "all", "--jitter", "5s", "--by", "ada")
    found = shell.json("schedules", "put", *machine, "--every", "2h", "--args", 3, *options)
    assert found == {"name": "weekly", "result": "stored"}
    [row] = shell.json("schedules")
    rule = row["definition"]
    assert (rule["every"], rule["overlap"], rule["missed"], rule["jitter"]) == (7200, "allow", "all", 5)
    assert (row["machine"], row["queue"], row["origin"], row["state"]) == (
        "cli:report",
        "slow",
        "api",
        "active",
    )
    assert [(each["command"], each["by"]) for each in shell.json("audit")["receipts"]][:1] == [("put", "ada")]
    assert "either cron= or every=" in shell.refused("schedules", "put", *machine, "--args", 3)
    assert "not a cron expression" in shell.refused("schedules", "put", *machine, "--cron", "x", "--args", 3)
    assert "Expected `int`" in shell.refused("schedules", "put", *machine, "--every", "2h", "--args", '"x"')
    assert "unknown" in shell.refused("schedules", "put", "x", "nobody", "--every", "2h")


def test_a_pause(nightly: Shell) -> None:
    said = nightly.ok("schedules", "pause", "nightly", "--by", "ada", "--reason", "holidays")
    assert said == "schedule nightly is paused\n"
    assert "nightly  paused" in (shown := nightly.ok("schedules"))
    assert "paused by ada: holidays" in shown
    assert "paused already" in nightly.refused("schedules", "pause", "nightly")
    assert nightly.json("schedules", "resume", "nightly") == {"name": "nightly", "result": "resumed"}
    commands = [(each["command"], each["by"]) for each in nightly.json("audit")["receipts"]]
    assert commands[1] == ("pause", "ada")


def test_run_and_backfill(nightly: Shell) -> None:
    said = nightly.json("schedules", "run", "nightly")
    [number] = said["result"]
    assert "has not ended" in nightly.refused("schedules", "run", "nightly")
    nightly.ok("schedules", "run", "nightly", "--overlap")
    assert f"instance {number} (run now)" in (shown := nightly.ok("schedules"))
    assert f"instance {number} has not ended" in shown
    end = datetime.now(UTC)
    times = ("--from", (end - timedelta(days=3)).isoformat(), "--to", end.isoformat())
    assert "has started 3 instances" in nightly.ok(
        "schedules", "backfill", "nightly", *times, "--idempotency-key", "k"
    )
    listed = nightly.json("list", "--tag", "schedule:nightly")
    assert [each["id"] for each in listed["instances"]] == []  # `plan` has no tags
    assert "not an instant" in nightly.refused(
        "schedules", "backfill", "nightly", "--from", "x", "--to", "y", code=2
    )
    again = nightly.json("schedules", "backfill", "nightly", *times, "--idempotency-key", "k")
    assert len(again["result"]) == 3, "those of the first call"
    assert "have not ended" in nightly.refused("schedules", "backfill", "nightly", *times)


def test_records(nightly: Shell, durable_dsn: str) -> None:
    rows = [
        ("2026-01-01T03:00Z", "2026-01-03T03:00Z", 3, "skipped", "paused"),
        ("2026-02-01T03:00Z", "2026-12-03T03:00Z", None, "skipped", "missed"),
        ("2026-12-04T03:00Z", "2026-12-04T03:00Z", 1, "skipped", "queue_paused"),
        ("2026-12-05T03:00Z", "2026-12-05T03:00Z", 1, "buffered", None),
    ]
    columns = "name, slot, last_slot, slots, outcome, reason"
    insert = f"insert into durable.schedule_log ({columns}) values ('nightly', %s, %s, %s, %s, %s)"
    for row in rows:
        nightly.conn.execute(insert, row)
    shown = nightly.ok("schedules", "--records", 3)
    assert (
        "skipped: missed, with those after it up to 2026-12-03 03:00:00 UTC, more than 1000 in all" in shown
    )
    assert "skipped: queue paused" in shown
    assert "waits until the running instance has ended" in shown
    assert "paused, with" not in shown
    assert "3 in all" in nightly.ok("schedules")


def test_delete(nightly: Shell) -> None:
    assert nightly.ok("schedules", "delete", "over") == "schedule over is deleted\n"
    assert [each["name"] for each in nightly.json("schedules")] == ["nightly"]


def test_the_options_of_a_command_come_after_it(nightly: Shell, durable_dsn: str) -> None:
    result = nightly.run("schedules", "--dsn", durable_dsn, "pause", "nightly")
    assert result.exit_code == 2
    assert "give --dsn after pause" in result.stderr


def test_a_node_that_is_too_old(nightly: Shell) -> None:
    nightly.node("old:1", queues={}, machines=[], version="0.1.0")
    assert "node old:1 (0.1.0) ignores schedules" in nightly.run("schedules").stderr
    assert json.loads(nightly.run("schedules", "--json").stdout)
