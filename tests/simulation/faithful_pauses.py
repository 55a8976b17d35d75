"""The part of the walks of test_faithful.py that pauses and resumes: instances, queues, a machine in a queue."""

from __future__ import annotations

from random import Random
from typing import Any

from durable_actors._store import pausing
from durable_actors._store.claim import read_queue, read_queue_pauses
from durable_actors._store.commands import plan_command
from durable_actors._store.dialogues import run_dialogue
from durable_actors.errors import Conflict

SCHEMA = "durable"
QUEUES = ("default", "other")


async def pause_queue(conn: Any, queue: str, machine: str | None, seconds: float | None) -> object:
    plan = pausing.plan_queue(queue, machine, seconds)
    done = await run_dialogue(conn, pausing.pausing_queue(SCHEMA, plan, plan_command(by="ada")))
    return done.pause.queue, done.pause.machine, done.pause.until is None, done.pause.by


async def resume_queue(conn: Any, queue: str, machine: str | None) -> object:
    plan = pausing.plan_queue(queue, machine)
    try:
        await run_dialogue(conn, pausing.resuming_queue(SCHEMA, plan, plan_command()))
    except Conflict as refused:
        return str(refused)
    return None


async def shape(conn: Any) -> object:
    """What a feeder is told of each queue, and a control look of both; without times."""
    shapes = [await read_queue(conn, SCHEMA, queue) for queue in QUEUES]
    told = [(each.priorities, each.shelved, sorted(each.pauses)) for each in shapes]
    looked = await read_queue_pauses(conn, SCHEMA, QUEUES)
    return told, {queue: sorted(pauses) for queue, pauses in looked.items()}


class PauseWalks:
    """Steps of a walk; `Pair` has what they need."""

    random: Random
    server: Any
    same: Any

    async def pause(self) -> None:
        """An instance is paused, or resumed; and another one, so that not all of them are paused in the end."""
        rows = list(self.server.tables.rows.values())
        await self.same(pausing.pause_instance, SCHEMA, self.random.choice(rows).id)
        paused = [row.id for row in rows if row.paused and row.status != "cancelled"]
        for number in self.random.sample(paused, (len(paused) + 1) // 2):
            await self.same(pausing.resume_instance, SCHEMA, number)

    async def stop_queue(self) -> None:
        """A queue, or the machine in it, is paused, or what is paused is resumed. Nothing ends by itself here."""
        which = self.random.choice(QUEUES), self.random.choice((None, "m"))
        if self.random.random() < 0.4:
            await self.same(pause_queue, *which, self.random.choice((None, 3600.0)))
        else:
            await self.same(resume_queue, *which)
            for queue, fsm in sorted(self.server.tables.pauses):
                await self.same(resume_queue, queue, fsm or None)
        await self.same(shape)
