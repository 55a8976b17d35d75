"""TLS and SCRAM: the driver and an engine over them."""

from __future__ import annotations

import durable_actors as da
import psycopg
import pytest
import trio
from durable_actors._postgres.driver.connection import PgConn
from durable_actors._postgres.driver.statement import Statement
from tests.engine.kit import running
from tests.kit import PATIENCE, until
from tests.postgres.tls.conftest import PASSWORD, make_certificate

SSL = Statement("ssl", "select ssl, version from pg_stat_ssl where pid = pg_backend_pid()", read_only=True)
ECHO = Statement("echo", "select $1::text")
LENGTH = Statement("length", "select length($1::text)")
ROWS = Statement("rows", "select repeat('x', $1::int) from generate_series(1, $2::int)", read_only=True)
NAP = Statement("nap", "select pg_sleep(600)")


@pytest.fixture
async def conn(secure):
    found = await PgConn.open(secure.dsn)
    yield found
    found.close()


async def test_encrypted_and_verified(conn):
    [[ssl, version]] = (await conn.run(SSL)).rows
    assert (ssl, version[:4]) == (b"t", b"TLSv")
    assert (await conn.run(ECHO, ["grün".encode()])).rows == [["grün".encode()]]


async def test_the_password_is_bound_to_the_channel(secure):
    found = await PgConn.open(secure.way(channel_binding="require", require_auth="scram-sha-256"))
    assert (await found.run(SSL)).rows[0][0] == b"t"
    found.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"password": "wrong"}, "password authentication failed"),
        ({"password": ""}, "no password supplied"),
        ({"sslmode": "disable"}, "no encryption"),
        ({"host": "elsewhere"}, "elsewhere"),
    ],
)
async def test_refused(secure, options, text):
    with pytest.raises(da.StoreUnavailable, match=text) as caught:
        await PgConn.open(secure.way(**options))
    assert PASSWORD not in str(caught.value)
    assert PASSWORD not in repr(caught.value.__cause__)


async def test_a_certificate_of_somebody_else(secure):
    trusted = secure.certificate.read_bytes()
    other = make_certificate(secure.cluster)
    try:
        with pytest.raises(da.StoreUnavailable, match="certificate"):
            await PgConn.open(secure.dsn)
    finally:
        other.write_bytes(trusted)


async def test_answers_of_every_size(conn):
    """TLS comes in records that libpq may read in part: what it has decrypted does not show on the socket."""
    with trio.fail_after(PATIENCE):
        for size in (
            1,
            4000,
            8000,
            8191,
            8192,
            9000,
            15_000,
            16_383,
            16_384,
            16_385,
            24_000,
            33_000,
            70_000,
            900_000,
        ):
            for count in (1, 2, 7):
                rows = (await conn.run(ROWS, [str(size).encode(), str(count).encode()])).rows
                assert [len(row[0]) for row in rows] == [size] * count
        for size in range(7000, 34_000, 97):
            assert len((await conn.run(ROWS, [str(size).encode(), b"1"])).rows[0][0]) == size


async def test_a_question_larger_than_every_buffer(conn):
    with trio.fail_after(PATIENCE):
        assert (await conn.run(LENGTH, [b"x" * 20_000_000])).rows == [[b"20000000"]]
        [[echo], _] = [result.rows[0] for result in await conn.batch([(ECHO, [b"y" * 9_000_000]), (SSL, ())])]
    assert echo == b"y" * 9_000_000


async def test_cancelled(conn):
    with trio.move_on_after(0.1) as scope:
        await conn.run(NAP)
    assert scope.cancelled_caught
    assert conn.pristine
    assert (await conn.run(ECHO, [b"again"])).rows == [[b"again"]]


async def test_a_backend_that_is_gone(secure, conn):
    assert conn.alive()
    with psycopg.connect(secure.dsn, autocommit=True) as admin:
        admin.execute("select pg_terminate_backend(%s, 10000)", [conn.pid])
    await until(lambda: not conn.alive())
    with pytest.raises(da.StoreUnavailable):
        await conn.run(ECHO, [b"x"])


@pytest.mark.usefixtures("registry")
async def test_an_engine(secure):
    class Waits(da.Machine, name="waits"):
        @da.step
        async def start(self, ctx):
            return da.Await("go", {"big": "x" * 50_000}, then=self.end)

        @da.step
        async def end(self, ctx):
            return da.Done([len(ctx.state["big"]), ctx.awaited[0].payload])

    async with running(secure.dsn) as run:
        ids = [await run.insert(Waits, partition_key=str(n % 3)) for n in range(12)]
        for number in ids:
            await run.engine.client.signal(number, "go", number)
        assert [(await run.ended(number)).result for number in ids] == [[50_000, number] for number in ids]
        with psycopg.connect(secure.dsn) as conn:
            query = (
                "select bool_and(ssl) from pg_stat_ssl join pg_stat_activity using (pid)"
                " where backend_type = 'client backend' and client_addr is not null"
            )
            assert conn.execute(query).fetchone() == (True,)
    assert PASSWORD not in repr(run.engine.config)
