"""Every page of the dashboard on the big table: whatever it reads has a bounded cost, and nothing scans the table."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Params, Statement
from durable_actors._postgres.pool.lock_retry import CLIENT_SETTINGS
from durable_actors._store.limits import LimitCaps
from durable_actors._store.sql import statement
from durable_actors.dashboard.opening import open_app
from durable_actors.dashboard.views import PAGES
from durable_actors.dashboard.views.limits import LIST, ONE
from durable_actors.dashboard_options import Dashboard
from tests.dashboard.conftest import Browser
from tests.store.kit import SCHEMA
from tests.store.test_plans import measure

pytestmark = pytest.mark.timeout(180)  # the first one fills the table

MOST_PAGES = 40_000
"""Of 8 kB, in the cache: some 5 µs each with the work on their rows, so that 200 ms are 40,000 of them."""
PATHS = {
    "/queues/{name}": "/queues/hot",
    "/machines/{name}": "/machines/m",
    "/limits/{name}": "/limits/api",
    "/schedules/{name}": "/schedules/nightly",
    "/nodes/{incarnation}": "/nodes/node%201",
    "/instances/{id:int}": "/instances/{newest}",
}
FILTERS = (
    "/instances?q=status:failed",
    "/instances?q=status:executing",
    "/instances?q=status:done",
    "/instances?q=machine:nobody",
    "/instances?q=error:nothing",
    "/instances?q=step:nowhere+queue:none",
    "/instances?q=waiting:approval",
    "/instances?q=waiting:signal",
    "/instances?q=paused:yes",
    "/instances?q=tag:x",
    "/instances?q=key:x",
    "/instances?q=parent:1",
    "/instances?q=older:1h",
    "/approvals?kind=approval",
    "/triage?by=error",
    "/audit?by=nobody&target=x",
)


async def statements_of(
    app: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Statement, Params]]:
    """What a page asks the database."""
    found: list[tuple[Statement, Params]] = []
    real = PgConn.run

    async def recorded(self: PgConn, call: Statement, params: Params = (), *args: Any, **options: Any) -> Any:
        found.append((call, params))
        return await real(self, call, params, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(PgConn, "run", recorded)
        app.desk.sampler._shared.clear()
        answer = await Browser(app).get(path)
    assert answer.status in {200, 404}, (path, answer.text)
    return found


async def test_every_page_has_a_bounded_cost(
    big: psycopg.Connection, filled_dsn: str, monkeypatch: pytest.MonkeyPatch
):
    [(newest,)] = big.execute("select max(id) from durable.gen_durable").fetchall()
    paths = [PATHS.get(page.path, page.path).format(newest=newest) for page in PAGES] + [*FILTERS]
    assert not [path for path in paths if "{" in path], "PATHS has a path for every page"
    async with open_app(filled_dsn, settings=Dashboard(interval=3600)) as app:
        asked = {path: await statements_of(app, path, monkeypatch) for path in paths}
    costs: dict[str, int] = {}
    for path, calls in asked.items():
        costs[path] = 0
        for call, params in calls:
            found = measure(big, (call, params), CLIENT_SETTINGS)
            found.assert_no_seq_scan("gen_durable")
            costs[path] += found.buffers
    too_dear = {path: cost for path, cost in costs.items() if cost > MOST_PAGES}
    assert not too_dear, costs
    assert costs["/"] == costs["/queues"] == 0, "they read the sample, which somebody else took"
    assert sum(map(len, asked.values())) > len(paths), "the statements were seen"


@pytest.fixture
def throttled(big: psycopg.Connection):
    """40,000 instances wait under 10,000 keys of a limit, and 30,000 more keys have spent tokens. Rolled back."""
    with big.transaction(force_rollback=True):
        big.execute("insert into durable.limits (name, interval, burst, slots) values ('api', 1, 10, 3)")
        big.execute(
            "insert into durable.gen_durable (queue, fsm, step, rate_limit, limited_by, hold, eligible_at)"
            " select 'limited', 'm', 's', 'api:t' || n % 10000, 'api:t' || n % 10000, 3, now() - interval '1 h'"
            " from generate_series(1, 40000) n"
        )
        big.execute(
            "insert into durable.gen_durable (queue, fsm, step, rate_limit, limited_by, hold)"
            " select 'limited', 'm', 's', 'api', 'api', 3 from generate_series(1, 20000)"
        )
        big.execute(
            "insert into durable.limit_keys (key, tat, at) select 'api:t' || n, now() + interval '1 h', now()"
            " from generate_series(0, 39999) n"
        )
        big.execute(
            "insert into durable.limit_waits (key, queue, next_at)"
            " select 'api:t' || n, 'limited', now() from generate_series(0, 9999) n"
            " union all select 'api', 'limited', now()"
        )
        big.execute("analyze durable.limit_keys, durable.limit_waits, durable.limits")
        yield big


@pytest.mark.parametrize("caps", [LIST, ONE], ids=["list", "one"])
def test_limits_cost_their_caps(throttled: psycopg.Connection, caps: LimitCaps):
    name = b"api" if caps is ONE else None
    numbers = [str(each).encode() for each in (caps.keys, caps.waiting, caps.lines)]
    found = measure(
        throttled, (statement("read_limits", SCHEMA, read_only=True), [*numbers, name, None]), CLIENT_SETTINGS
    )
    found.assert_no_seq_scan("gen_durable")
    found.assert_uses("gen_durable_throttled", "gen_durable_slots")
    assert found.buffers < MOST_PAGES
    few = [str(each).encode() for each in (caps.keys // 5, 10, 100)]
    least = measure(
        throttled, (statement("read_limits", SCHEMA, read_only=True), [*few, name, None]), CLIENT_SETTINGS
    )
    assert least.buffers < found.buffers / 2, "less to look at costs less"


def test_a_sample_of_limits_costs_its_cap(throttled: psycopg.Connection):
    plans = {
        cap: measure(throttled, (statement("sample_limits", SCHEMA), [str(cap).encode()]), CLIENT_SETTINGS)
        for cap in (1000, 10_001)
    }
    for found in plans.values():
        found.assert_no_seq_scan("gen_durable")
        found.assert_uses("gen_durable_throttled")
    assert plans[1000].buffers < plans[10_001].buffers / 2
    undeclared = measure(
        throttled, (statement("find_undeclared", SCHEMA), [b"10001", b"10"]), CLIENT_SETTINGS
    )
    assert undeclared.buffers < 5000


def test_fair_shares_cost_their_keys(big: psycopg.Connection):
    """Two hundred keys with 200 rows each: the page counts the first hundred."""
    with big.transaction(force_rollback=True):
        big.execute(
            "insert into durable.gen_durable (queue, fsm, step, fair_key)"
            " select 'fair', 'm', 's', 'tenant ' || n % 200 from generate_series(1, 40000) n"
        )
        plans = {
            keys: measure(
                big, (statement("read_fair_shares", SCHEMA), [b"{fair}", str(keys).encode()]), CLIENT_SETTINGS
            )
            for keys in (10, 100)
        }
    for found in plans.values():
        found.assert_no_seq_scan("gen_durable")
        found.assert_uses("gen_durable_fair")
    assert plans[10].buffers < plans[100].buffers / 2
    assert plans[100].buffers < MOST_PAGES
