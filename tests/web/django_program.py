"""Django's connection, passed as it is. Run by test_frameworks.py in a process of its own: settings are global."""

from __future__ import annotations

import contextlib
import os

import django
import durable_actors as da
import psycopg
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

given = conninfo_to_dict(os.environ["DURABLE_DSN"])
names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "dbname"}
database = {name: str(given.get(key, "")) for name, key in names.items()}
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database, "ATOMIC_REQUESTS": True}}
)
django.setup()

from django.db import connection, connections, transaction  # noqa: E402


@da.job(name="mail")
async def mail(args: dict) -> None: ...


class Back(Exception): ...


def count() -> int:
    with psycopg.connect(os.environ["DURABLE_DSN"]) as conn:
        row = conn.execute("select count(*) from durable.gen_durable").fetchone()
        assert row is not None
        return int(row[0])


# Outside atomic(): at once, and nobody has used the connection before.
assert connection.connection is None
first = da.sync.insert(connection, mail)
assert count() == 1

# In atomic(): with its commit. The proxy and the wrapper behind it are the same.
with transaction.atomic():
    da.sync.insert(connection, mail)
    da.sync.insert_many(connections["default"], mail, [{}, {}])
    assert da.sync.inspect(connection, first).status == "runnable"
    assert count() == 1
assert count() == 4

# A savepoint that is rolled back takes its instances with it; so does a transaction.
with transaction.atomic():
    with contextlib.suppress(Back), transaction.atomic():
        da.sync.insert(connection, mail)
        raise Back
    da.sync.insert(connection, mail, unique_key="k")
    with contextlib.suppress(da.Duplicate):  # the transaction is still good
        da.sync.insert(connection, mail, unique_key="k")
    da.sync.cancel(connection, first, by="django")
assert count() == 5
with contextlib.suppress(Back), transaction.atomic():
    da.sync.insert(connection, mail)
    raise Back
assert count() == 5
assert da.sync.inspect(connection, first).status == "cancelled"

# Django refuses what follows an error inside atomic(), until its end.
try:
    with transaction.atomic():
        transaction.set_rollback(True)
        da.sync.insert(connection, mail)
except transaction.TransactionManagementError:
    print("refused")
connection.close()
print("instances", count())
