"""The fixtures: which server they use, that each test has its own database, that nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import uuid
from pathlib import Path

import psycopg
import pytest
from durable_actors._postgres.embedded.process import server_processes
from durable_actors.testing import database, plugin
from durable_actors.testing.database import docker_answers, open_server, remove_abandoned, throwaway_directory
from tests.support.sql import need_statistics

pytestmark = pytest.mark.slow  # whole programs


def exists(server, dsn):
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(server.dsn) as connection:
        return (
            connection.execute("select 1 from pg_database where datname = %s", [name]).fetchone() is not None
        )


def wait_until(condition, what):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


@pytest.fixture
def same_server(durable_server):
    """A second `DatabaseServer` on the run's server, as another worker has it."""
    with open_server(run=uuid.uuid4().hex, dsn=durable_server.dsn) as server:
        yield server


def test_three_fixtures_three_databases(pg_dsn, empty_dsn, durable_dsn):
    names = set()
    for dsn in (pg_dsn, empty_dsn, durable_dsn):
        with psycopg.connect(dsn) as connection:
            names.add(connection.info.dbname)
    assert len(names) == 3


@pytest.mark.parametrize("n", range(3))
def test_each_test_has_its_own_database(empty_dsn, n):
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("create table t (n int)")


def test_durable_dsn_has_the_schema(durable_dsn):
    with psycopg.connect(durable_dsn) as connection:
        assert connection.execute("select count(*) from durable.gen_durable").fetchone() == (0,)


def test_dropped_in_the_background_even_while_a_session_is_connected(same_server):
    with same_server.database() as dsn:
        leaked = psycopg.connect(dsn)
    wait_until(lambda: not exists(same_server, dsn), "the database is dropped")
    leaked.close()


def test_the_statistics_of_a_dropped_database_go_with_it(same_server):
    """The look at the statistics is what half of the statement counts' time was."""
    known = "select count(*) > 0 from pg_stat_statements(false) where dbid = %s"
    with psycopg.connect(same_server.dsn, autocommit=True) as connection:
        need_statistics(connection)
        with same_server.database() as dsn, psycopg.connect(dsn) as other:
            [number] = other.execute(
                "select oid from pg_database where datname = current_database()"
            ).fetchone()
            assert connection.execute(known, [number]).fetchone() == (True,)
        wait_until(
            lambda: connection.execute(known, [number]).fetchone() == (False,), "the statistics are gone"
        )


def test_drop_refuses_what_it_did_not_make(same_server):
    with pytest.raises(ValueError, match="'postgres' is not a database of these fixtures"):
        same_server.drop(same_server.dsn_of("postgres"))


def test_only_the_first_worker_fills_the_template(durable_server):
    run, calls, names = uuid.uuid4().hex, [], []

    def prepare(dsn):
        calls.append(dsn)
        with psycopg.connect(dsn) as connection:
            connection.execute("create table from_template (n int)")

    def worker():
        with open_server(run=run, dsn=durable_server.dsn) as server:
            names.append(server.template(prepare))
            with server.database(template=names[-1]) as dsn, psycopg.connect(dsn) as connection:
                connection.execute("select n from from_template")
            meet.wait()

    meet = threading.Barrier(3)
    threads = [threading.Thread(target=worker) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(names)) == 1


def test_a_template_that_fails_is_tried_again(same_server):
    def fail(dsn):
        raise RuntimeError("half-way")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="half-way"):
            same_server.template(fail)
    assert same_server.template(lambda dsn: None)


def test_databases_of_a_killed_run_are_dropped_after_hours(same_server):
    old = f"{database.PREFIX}{int(time.time()) - database.STALE_AFTER - 60:x}_abc_0"
    foreign = f"{database.PREFIX}of_somebody_else_{uuid.uuid4().hex}"
    for name in (old, foreign):
        same_server._create(name, "template0")
    with open_server(dsn=same_server.dsn) as another:
        wait_until(lambda: not exists(another, another.dsn_of(old)), "the old database is dropped")
        assert exists(another, another.dsn_of(foreign))
    same_server.drop(same_server.dsn_of(foreign))


RUN = """
import sys
from pathlib import Path
from durable_actors.testing.database import start_throwaway
server = start_throwaway(Path(sys.argv[1]))
print(server.dsn(), flush=True)
input()
"""


@pytest.fixture
def other_run():
    """Another test run's server, and the process that uses it."""
    directory = throwaway_directory(uuid.uuid4().hex[:12])
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline()
    yield directory, process
    process.kill()
    process.communicate()
    wait_until(lambda: not directory.exists(), "the directory is gone")


def test_nothing_is_left_after_kill_9_of_the_run(other_run):
    directory, process = other_run
    process.kill()
    wait_until(lambda: not directory.exists(), "the directory is gone")
    assert server_processes(directory / "pgdata") == []


def test_the_next_run_removes_what_kill_9_of_everything_left(other_run):
    directory, process = other_run
    remove_abandoned(directory.parent)
    assert directory.exists(), "it is in use"
    os.kill(database.embedded.status(directory).supervisor, signal.SIGKILL)
    process.kill()
    process.wait()
    wait_until(lambda: not database.embedded.status(directory).supervisor, "the supervisor is dead")
    remove_abandoned(directory.parent)
    assert not directory.exists()
    assert server_processes(directory / "pgdata") == []


@pytest.fixture
def engine(tmp_path):
    """A listener in place of a Docker engine, which sends this answer."""
    listeners = []

    def listen(answer: bytes | None) -> dict[str, str]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve():
            connection, _ = listener.accept()
            with connection:
                if answer is None:
                    connection.recv(1000)
                    connection.recv(1)  # never answers: waits until the other side gives up
                else:
                    connection.recv(1000)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        return {"DOCKER_HOST": f"tcp://127.0.0.1:{listener.getsockname()[1]}"}

    yield listen
    for listener in listeners:
        listener.close()


def test_docker_is_asked_at_its_socket(engine, tmp_path):
    assert docker_answers(engine(b"HTTP/1.0 200 OK\r\n\r\nOK"))
    assert not docker_answers(engine(b"HTTP/1.0 500 Internal Server Error\r\n\r\n"))
    assert not docker_answers({"DOCKER_HOST": f"unix://{tmp_path}/no.sock"})
    assert not docker_answers({"DOCKER_HOST": "ssh://somewhere"})


def test_a_docker_that_never_answers_costs_a_tenth_of_a_second(engine):
    started = time.perf_counter()
    assert not docker_answers(engine(None))
    assert time.perf_counter() - started < 2.0


def test_provider_order(monkeypatch, durable_server):
    def container():
        raise AssertionError("Docker comes after DURABLE_TEST_DSN")

    monkeypatch.setattr(database, "docker_answers", lambda: True)
    monkeypatch.setattr(database, "open_container", container)
    monkeypatch.setenv("DURABLE_TEST_DSN", durable_server.dsn)
    with open_server() as server:
        assert server.provider == "DURABLE_TEST_DSN"
    monkeypatch.delenv("DURABLE_TEST_DSN")
    with pytest.raises(AssertionError, match="Docker comes"), open_server():
        pass


@pytest.fixture
def containers(monkeypatch):
    """Stands in for testcontainers: there is no Docker engine where most people run these tests."""
    made = []

    class PostgresContainer:
        def __init__(self, image, **options):
            self.image, self.options, self.running = image, options, False
            made.append(self)

        def with_command(self, command):
            self.command = command

        def __enter__(self):
            self.running = True

        def __exit__(self, *_):
            self.running = False

        def get_connection_url(self, driver):
            assert driver is None
            return "postgresql://somewhere/postgres"

    module = types.ModuleType("testcontainers.community.postgres")
    module.PostgresContainer = PostgresContainer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def test_container_is_a_throwaway_server(containers):
    with database.open_container() as dsn:
        (container,) = containers
        assert container.running
        assert dsn == "postgresql://somewhere/postgres"
        assert "-c fsync=off" in container.command
        assert "-c shared_preload_libraries=pg_stat_statements" in container.command
    assert not container.running


def test_one_container_for_all_workers_outlives_them(containers, monkeypatch):
    monkeypatch.delenv("DURABLE_TEST_DSN", raising=False)
    monkeypatch.setattr(plugin, "docker_answers", lambda: True)
    cleanups = []
    config = types.SimpleNamespace(stash=pytest.Stash(), add_cleanup=cleanups.append)
    nodes = [types.SimpleNamespace(config=config, workerinput={}) for _ in range(2)]
    for node in nodes:
        plugin.pytest_configure_node(node)
    assert [node.workerinput["durable_test_dsn"] for node in nodes] == ["postgresql://somewhere/postgres"] * 2
    (container,) = containers
    assert container.running
    for cleanup in cleanups:
        cleanup()
    assert not container.running


WORKERS = """
import time
import pytest
pytest_plugins = ["durable_actors.testing.plugin"]

@pytest.mark.parametrize("n", range(6))
def test_shared(n, durable_server, empty_dsn, tmp_path_factory):
    with open({out!r}, "a") as file:
        print(durable_server.dsn, file=file)
"""


def test_all_workers_of_a_run_share_one_server(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(WORKERS.format(out=str(tmp_path / "out")))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "xdist", "-p", "no:cacheprovider"]
    environ = {
        name: os.environ[name] for name in os.environ if not name.startswith(("PYTEST", "DURABLE_TEST"))
    }
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half the time: only xdist matters here
    done = subprocess.run(
        [*command, "-c", "pytest.ini", str(tmp_path)],
        capture_output=True,
        text=True,
        env=environ,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    servers = (tmp_path / "out").read_text().split("\n")
    assert len(set(servers) - {""}) == 1
    directory = Path(psycopg.conninfo.conninfo_to_dict(servers[0])["host"]).parent
    wait_until(lambda: not directory.exists(), "the server's directory is gone after the run")
