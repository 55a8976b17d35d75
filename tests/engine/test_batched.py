"""Batched reads: one statement for many keys; a cancelled caller never becomes the reader; nobody waits for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import pytest
import trio
import trio.testing
from durable_actors._engine.running.batched import Batched


class Store:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.fails: Exception | None = None
        self.seconds = 1.0

    async def fetch(self, keys: list[int]) -> Mapping[int, int | None]:
        self.batches.append(keys)
        await trio.sleep(self.seconds)
        if self.fails is not None:
            raise self.fails
        return {key: key * 10 or None for key in keys}


async def test_who_asks_meanwhile_is_in_the_next_batch(autojump_clock):
    store = Store()
    batched = Batched(store.fetch, limit=3)
    found: dict[int, int | None] = {}

    async def ask(key: int) -> None:
        found[key] = await batched.get(key)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, 0)
        await trio.sleep(0.5)
        for key in range(1, 8):
            nursery.start_soon(ask, key)
    assert found == {key: key * 10 or None for key in range(8)}
    assert [len(batch) for batch in store.batches] == [1, 3, 3, 1]


async def test_a_cancelled_reader_passes_its_turn_on(autojump_clock):
    store = Store()
    batched = Batched(store.fetch)
    scope = trio.CancelScope()
    found: list[int | None] = []

    async def first() -> None:
        with scope:
            await batched.get(1)

    async def second() -> None:
        found.append(await batched.get(2))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await trio.sleep(0.1)
            nursery.start_soon(second)
            await trio.sleep(0.1)
            scope.cancel()
    assert found == [20]
    assert store.batches == [[1], [2]]


@pytest.mark.parametrize("cancelled", [[1], [2], [1, 2], [2, 3], [1, 2, 3]])
async def test_whoever_is_cancelled_the_others_are_answered(autojump_clock, cancelled):
    for moment in (0.0, 0.5, 1.0, 1.5):
        store = Store()
        batched = Batched(store.fetch, limit=2)
        scopes = {key: trio.CancelScope() for key in range(6)}
        found: dict[int, int | None] = {}

        async def ask(key: int, scopes=scopes, batched=batched, found=found) -> None:
            with scopes[key]:
                found[key] = await batched.get(key)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for key in range(6):
                    nursery.start_soon(ask, key)
                await trio.sleep(moment)
                for key in cancelled:
                    scopes[key].cancel()
        assert set(found) >= set(range(6)) - set(cancelled), moment


async def test_a_failure_is_everybodys_in_the_batch_and_nobodys_after(autojump_clock):
    store = Store()
    batched = Batched(store.fetch)
    failures: list[Exception] = []

    async def ask(key: int) -> None:
        try:
            await batched.get(key)
        except OSError as exc:
            failures.append(exc)

    store.fails = OSError("gone")
    async with trio.open_nursery() as nursery:
        for key in range(3):
            nursery.start_soon(ask, key)
    assert len(failures) == 3
    store.fails = None
    assert await batched.get(7) == 70


class Broken:
    """Refuses every batch that has one of these keys."""

    def __init__(self, *keys: int) -> None:
        self.keys = set(keys)
        self.batches: list[list[int]] = []

    async def fetch(self, keys: list[int]) -> Mapping[int, int]:
        self.batches.append(keys)
        await trio.sleep(1)
        if self.keys & set(keys):
            raise ValueError
        return {key: key for key in keys}


@pytest.mark.parametrize("broken", [(0,), (5,), (7,), (2, 3), (0, 7), (1, 4, 6)])
async def test_a_key_that_cannot_be_read_fails_alone(autojump_clock, broken):
    store = Broken(*broken)
    batched: Batched[int, int] = Batched(store.fetch, split_on=ValueError)
    answers, failures = set[int](), set[int]()

    async def ask(key: int) -> None:
        try:
            answers.add(await batched.get(key))
        except ValueError:
            failures.add(key)

    async with trio.open_nursery() as nursery:
        for key in range(8):
            nursery.start_soon(ask, key)
    assert failures == set(broken)
    assert answers == set(range(8)) - failures


async def test_if_no_key_can_be_read_the_statements_are_few(autojump_clock):
    store = Broken(*range(500))
    batched: Batched[int, int] = Batched(store.fetch, split_on=ValueError)
    failures: list[int] = []

    async def ask(key: int) -> None:
        try:
            await batched.get(key)
        except ValueError:
            failures.append(key)

    async with trio.open_nursery() as nursery:
        for key in range(500):
            nursery.start_soon(ask, key)
    assert len(failures) == 500
    assert len(store.batches) <= 50


async def test_who_is_cancelled_while_a_refused_batch_is_halved(autojump_clock):
    for moment in range(1, 9):
        for cancelled in range(4):
            store = Broken(2)
            batched: Batched[int, int] = Batched(store.fetch, split_on=ValueError)
            scopes = [trio.CancelScope() for _ in range(4)]
            ended = set[int]()

            async def ask(key: int, batched=batched, scopes=scopes, ended=ended) -> None:
                with scopes[key], contextlib.suppress(ValueError):
                    await batched.get(key)
                ended.add(key)

            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for key in range(4):
                        nursery.start_soon(ask, key)
                    await trio.sleep(moment - 0.5)
                    scopes[cancelled].cancel()
            assert ended == set(range(4))


async def test_a_batch_that_comes_back_leaves_out_who_has_gone(autojump_clock):
    """Cancelled in this order: one of the batch that is being read, then its reader. The others go on."""
    hold, answered, batches = trio.Event(), [], []
    scopes = [trio.CancelScope() for _ in range(4)]

    async def fetch(keys):
        batches.append(keys)
        if keys in ([0], [1, 2]):
            await hold.wait()
        return {key: key for key in keys}

    batched = Batched(fetch, limit=2)

    async def ask(key):
        with scopes[key]:
            answered.append(await batched.get(key))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for key in range(4):
                nursery.start_soon(ask, key)
                await trio.testing.wait_all_tasks_blocked()
            for key in (0, 2, 1):
                scopes[key].cancel()
                await trio.testing.wait_all_tasks_blocked()
    assert batches == [[0], [1, 2], [3]]
    assert answered == [3]
