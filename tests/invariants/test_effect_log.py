"""The effect log: lines are whole or skipped, events are read in order, whoever wrote them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import durable_actors as da
import pytest
import trio
from tests.invariants.effect_log import Effect, EffectLog, read_effects


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "effects.jsonl"


@pytest.fixture
def log(path: Path):
    log = EffectLog(path)
    yield log
    log.close()


def context(**more) -> da.Context:
    known = {"state": {}, "id": 7, "machine": "m", "step": "s", "visit": 2, "attempt": 1, "claim_id": "c"}
    return da.Context(**(known | more))


async def test_a_step_tells_what_it_is(log, path):
    awaited = (da.Signal(3, "go"),)
    log.begin(context(awaited=awaited, signals=(*awaited, da.Signal(4, "other"))), extra=5)
    log.end(context(), outcome=da.Next("b", consume=(4,)))
    log.note("mail", context(), to="x")
    log.note("inserted", id=9)
    begin, end, mail, inserted = read_effects(path)
    assert (begin.kind, begin.id, begin.fsm, begin.step, begin.visit) == ("begin", 7, "m", "s", 2)
    assert (begin.attempt, begin.claim, begin.pid, begin.run) == (1, "c", os.getpid(), ("c", 2))
    assert begin.data == {"awaited": [3], "signals": [3, 4], "children": 0, "extra": 5}
    assert end.data == {"outcome": "Next", "next": "b", "consumed": [4]}
    assert (mail.run, mail.data) == (("c", 2), {"to": "x"})
    assert (inserted.id, inserted.run) == (9, None)
    assert begin.at < end.at < mail.at < inserted.at


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (da.Await("go", then="b"), {"outcome": "Await", "awaits": ["go"], "next": "b", "consumed": []}),
        (da.ScheduleChildren("b", []), {"outcome": "ScheduleChildren", "next": "b", "children": 0}),
        (da.Done(1), {"outcome": "Done"}),
        (da.Stop("x"), {"outcome": "Stop"}),
        (da.Retry(), {"outcome": "Retry"}),
        ("Done", {"outcome": "Done"}),
        (None, {"outcome": None}),
    ],
)
async def test_an_end_tells_the_outcome(log, path, outcome, told):
    log.end(context(), outcome=outcome)
    assert read_effects(path)[0].data == told


async def test_a_run_tells_that_it_is_left_however_that_is(log, path):
    with log.run(context()) as run:
        run.note("half")
        assert run.end(da.Done(1)) == da.Done(1)
    with pytest.raises(ValueError, match="boom"), log.run(context()):
        raise ValueError("boom")
    with trio.move_on_after(0), log.run(context()):
        await trio.sleep_forever()
    effects = read_effects(path)
    assert [each.kind for each in effects] == [
        "begin",
        "half",
        "end",
        "left",
        "begin",
        "left",
        "begin",
        "left",
    ]
    assert [each.data.get("error") for each in effects if each.kind == "left"] == [
        None,
        "ValueError",
        "Cancelled",
    ]


async def test_a_thread_is_told_apart(log, path):
    await trio.to_thread.run_sync(log.begin, context())
    log.begin(context())
    assert [each.data.get("thread") for each in read_effects(path)] == [True, None]


async def test_handle_is_no_begin(log, path):
    log.begin(context().for_handle())
    assert read_effects(path)[0].kind == "handle"


def test_what_was_done_to_the_world(log, path):
    log.paused(99)
    log.resumed(99)
    log.outage()
    log.recovered()
    log.sessions_lost("restart")
    effects = read_effects(path)
    assert [each.kind for each in effects] == ["paused", "resumed", "outage", "recovered", "sessions_lost"]
    assert [each.pid for each in effects][:2] == [99, 99]
    assert effects[-1].data == {"why": "restart"}


def test_a_torn_last_line_is_passed_over(log, path):
    log.note("a")
    with path.open("ab") as file:
        file.write(b'{"at": 1, "pid": 1, "ki')
    assert [each.kind for each in read_effects(path)] == ["a"]
    log.note("b")  # by another process that shares the file
    assert [each.kind for each in read_effects(path)] == ["a", "b"]


def test_what_is_no_event_is_an_error(path):
    path.write_text("hello\n")
    with pytest.raises(ValueError, match="not an event"):
        read_effects(path)


WRITER = """
import sys
from tests.invariants.effect_log import EffectLog
log = EffectLog(sys.argv[1])
for n in range(200):
    log.note("n", n=n, padding="x" * 500)
print("ready", flush=True)
while True:
    log.note("n", n=-1)
"""


def test_processes_share_a_file_and_are_killed(path):
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        writer.kill()
        writer.communicate()
    effects = read_effects(path)
    for writer in writers:
        assert [each.data["n"] for each in effects if each.pid == writer.pid][:200] == list(range(200))
    assert effects == sorted(effects, key=lambda each: each.at)


def test_a_directory_holds_many(tmp_path, path):
    for name in ("b", "a"):
        log = EffectLog(tmp_path / f"{name}.jsonl")
        log.note(name)
        log.close()
    (tmp_path / "other.txt").write_text("no log")
    assert [each.kind for each in read_effects(tmp_path)] == ["b", "a"]


def test_a_full_disk_is_told():
    log = EffectLog("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        log.note("a")
    log.close()


def test_events_read_well():
    effect = Effect(1, 5, "begin", 7, "m", "s", 2, 0, "0123456789", {"awaited": [3], "signals": []})
    assert str(effect) == "process 5: begin s, visit 2, attempt 0 under 01234567 awaited=[3]"
    assert str(Effect(1, 5, "paused")) == "process 5: paused"
    assert str(Effect(1, 5, "inserted", 7)) == "process 5: inserted"
