import psycopg
import pytest


def test_pg_dsn_is_an_empty_database(pg_dsn):
    with psycopg.connect(pg_dsn) as connection:
        assert connection.execute(
            "select count(*) from pg_class where relnamespace = 'public'::regnamespace"
        ).fetchone() == (0,)


@pytest.mark.parametrize("n", range(4))
def test_each_test_has_its_own_database(empty_dsn, n):
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("create table t (n int)")


async def test_async_tests_can_use_it(empty_dsn, durable_dsn):
    assert empty_dsn != durable_dsn
