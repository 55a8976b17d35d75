"""Input of tests/test_type_checks.py: mypy and pyright must report exactly the marked lines.

Options take what their converter takes and hold what it returns. The file is never imported.
"""

from datetime import timedelta
from typing import reveal_type

import durable_actors as da

config = da.Config(
    dsn=None,
    session_dsn=None,
    node=None,
    machines=[],
    modules="shop.machines",
    queues={"mail": 5, "orders": da.Queue(2, prefetch=3, poll_interval=timedelta(seconds=1), long_poll=None)},
    lease_ttl=timedelta(minutes=1),
    heartbeat_interval=None,
    poll_interval=1,
    max_poll_interval=timedelta(seconds=5),
    long_poll=None,
    max_crashes=None,
    late_commit="reject",
    retention=da.Retention(done=timedelta(days=1), cancelled=None, failed=60),
    observers=[print],
)
da.Config(modules=["shop.machines", "shop.mails"], heartbeat_interval=2.5)

reveal_type(config.dsn)  # R: str
reveal_type(config.lease_ttl)  # R: float
reveal_type(config.heartbeat_interval)  # R: float
reveal_type(config.long_poll)  # R: float
reveal_type(config.max_crashes)  # R: int \| None
reveal_type(config.queues)  # R: Mapping\[.*str, .*Queue\] \| None
reveal_type(config.modules)  # R: tuple\[.*str, \.\.\.\]
reveal_type(da.Queue(5).poll_interval)  # R: float \| None
reveal_type(config.retention)  # R: .*Retention \| None
reveal_type(da.Retention().done)  # R: float \| None

config.lease_ttl = 5  # E
da.Config("dbname=x")  # E
da.Config(leas_ttl=5)  # E
da.Config(dsn=5)  # E
da.Config(lease_ttl="60")  # E
da.Config(lease_ttl=None)  # E
da.Config(heartbeat_interval="20")  # E
da.Config(long_poll="off")  # E
da.Config(queues=["mail"])  # E
da.Config(queues={"mail": "5"})  # E
da.Config(modules=5)  # E
da.Config(observers=[5])  # E
da.Config(late_commit="maybe")  # E
da.Config(retention=60)  # E
da.Retention(60)  # E
da.Retention(done="1d")  # E
da.Retention(interval=None)  # E
da.Config(pool_size=None)  # E
da.Queue("5")  # E
da.Queue(5, 6)  # E
da.Queue(5, poll_interval="1")  # E
