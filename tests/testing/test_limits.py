"""Limits on a bench: declared by the test, and on its clock."""

from __future__ import annotations

import durable_actors as da
import pytest
from durable_actors.machine import isolated_registry
from durable_actors.testing import Bench


async def test_a_limit_is_declared_and_its_tokens_come_with_the_clock(durable: Bench):
    with isolated_registry():

        @da.job(name="limited", rate_limit="api")
        async def limited() -> None: ...

        first, second = [await durable.insert(limited) for _ in range(2)]
        assert (await durable.drain()).ran == ()  # nobody has declared it
        await durable.declare_limits({"api": da.Limit(1, per=60)})
        await durable.drain()
        await durable.assert_done(first)
        assert (await durable.explain(second)).reason == "throttled"
        await durable.advance("59s")
        assert (await durable.drain()).ran == ()
        await durable.advance("1s")
        await durable.drain()
        await durable.assert_done(second)


async def test_what_is_no_limit_is_refused(durable: Bench):
    with pytest.raises(da.ConfigError, match="must be a Limit"):
        await durable.declare_limits({"api": 3})  # type: ignore[dict-item]
