import psycopg
import pytest
from durable_actors.errors import ConfigError
from tests.support import sql as statements
from tests.support.sql import count_statements, explain


@pytest.fixture
def connection(empty_dsn):
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("create table item (id int primary key, kind int not null, note text)")
        connection.execute("insert into item select n, n % 7, 'x' from generate_series(1, 2000) n")
        connection.execute("create index item_kind on item (kind, id)")
        connection.execute("analyze item")
        yield connection


def test_counts_what_every_connection_does(connection, empty_dsn):
    with count_statements(empty_dsn) as count, psycopg.connect(empty_dsn) as other:
        for n in range(3):
            connection.execute("select note from item where id = %s", [n])
        other.execute("update item set note = 'y' where kind = 1")
        other.commit()
    assert count.calls("SELECT note") == 3
    assert (count.calls("update item"), count.calls("begin"), count.calls("commit")) == (1, 1, 1)
    assert count.total == 6
    (update,) = [s for s in count.statements if "update" in s.query]
    assert update.rows == 286
    assert "3 ×" in str(count)


def test_counts_statements_of_a_pipeline_one_by_one(connection, empty_dsn):
    with count_statements(empty_dsn) as count, connection.pipeline(), connection.transaction():
        for n in range(5):
            connection.execute("select note from item where id = %s", [n], prepare=True)
    assert count.calls("select note") == 5


def test_counts_this_database_only(connection, empty_dsn, pg_dsn):
    with count_statements(empty_dsn) as count, psycopg.connect(pg_dsn) as elsewhere:
        elsewhere.execute("select 1")
    assert count.total == 0


def test_says_what_the_server_lacks(connection):
    class Bare:
        def execute(self, statement):
            return connection.execute("select ''::text")

    with pytest.raises(ConfigError, match="shared_preload_libraries"):
        statements.need_statistics(Bare())


def test_explain_names_nodes_indexes_and_pages(connection):
    plan = explain(connection, "select id from item where kind = $1 order by id limit 5", [3])
    assert plan.indexes == {"item_kind"}
    assert plan.kinds[0] == "Limit"
    assert 0 < plan.buffers < 10
    plan.assert_no_seq_scan()
    plan.assert_uses("item_kind")


def test_explain_finds_what_is_wrong(connection):
    plan = explain(connection, "select * from item where note = $1", ["z"])
    assert plan.nodes[0].removed == 2000
    with pytest.raises(AssertionError, match="sequential scan of item"):
        plan.assert_no_seq_scan("item")
    plan.assert_no_seq_scan("another")
    with pytest.raises(AssertionError, match="item_kind"):
        plan.assert_uses("item_kind")


def test_explain_changes_nothing(connection):
    plan = explain(connection, "delete from item")
    assert "Delete" in plan.text
    assert connection.execute("select count(*) from item").fetchone() == (2000,)
    assert connection.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)


def test_explain_shows_the_generic_plan_unless_told_otherwise(connection):
    query = "select count(*) from item where id <= $1"
    assert "$1" in explain(connection, query, [1]).text
    assert "$1" not in explain(connection, query, [1], generic=False).text
    plan = explain(
        connection,
        query,
        [1],
        settings={
            "enable_seqscan": "on",
            "enable_indexonlyscan": "off",
            "enable_indexscan": "off",
            "enable_bitmapscan": "off",
        },
    )
    assert "Seq Scan" in plan.kinds


def test_explain_of_a_wrong_statement_leaves_the_connection_usable(connection):
    with pytest.raises(psycopg.errors.UndefinedTable):
        explain(connection, "select * from nowhere")
    with pytest.raises(psycopg.errors.DivisionByZero):
        explain(connection, "select 1 / $1", [0])
    assert connection.execute("select 1").fetchone() == (1,)
    assert explain(connection, "select 1").kinds == ("Result",)
