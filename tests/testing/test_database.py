import psycopg
import pytest


def test_pg_dsn_leads_to_a_database_of_this_worker(pg_dsn, empty_dsn, durable_dsn):
    names = []
    for dsn in (pg_dsn, empty_dsn, durable_dsn):
        with psycopg.connect(dsn) as connection:
            names.append(connection.info.dbname)
    assert len(set(names)) == 3


@pytest.mark.parametrize("n", range(3))
def test_each_test_has_its_own_database(empty_dsn, n):
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("create table t (n int)")
