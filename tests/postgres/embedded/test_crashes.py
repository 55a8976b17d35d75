"""Whoever is killed, at whatever moment: the server stops with its last user; no committed row is lost."""

import os
import signal

import psycopg
import pytest
from durable_actors._postgres.embedded import server as embedded
from durable_actors._postgres.embedded.process import after_crash, server_processes
from tests.kit import wait_until
from tests.postgres.embedded.conftest import is_locked

pytestmark = pytest.mark.slow  # whole programs


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def answers(query, dsn):
    try:
        return query(dsn, "select 1") == 1
    except psycopg.OperationalError:
        return False


KEPT = "drop table if exists kept; create table kept as select 42 as n"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_server_stops_when_its_only_client_is_killed(client, data_dir, gone, how):
    only = client(data_dir)
    only.ready()
    only.signal(how)
    gone(data_dir)


def test_server_stops_when_its_last_client_closes(client, data_dir, gone):
    only = client(data_dir)
    only.ready()
    only.tell("close")
    gone(data_dir)
    assert only.process.poll() is None


def test_server_stays_while_one_of_two_clients_lives(client, data_dir, gone, query):
    first, second = client(data_dir), client(data_dir)
    assert second.dsn == first.dsn
    first.signal(signal.SIGKILL)
    pid = second.process.pid
    wait_until(lambda: embedded.status(data_dir).clients in {(pid,), ()}, "only one lease is left")
    assert query(second.dsn, "select 1") == 1
    assert embedded.status(data_dir).postmaster == first.ready()["postmaster"]
    second.signal(signal.SIGKILL)
    gone(data_dir)


def test_killed_postmaster_is_started_again_with_its_data(client, data_dir, query):
    user = client(data_dir)
    query(user.dsn, KEPT)
    before = embedded.status(data_dir)
    with psycopg.connect(user.dsn):  # a backend is left without its postmaster
        kill(before.postmaster)
        wait_until(
            lambda: embedded.status(data_dir).postmaster not in {before.postmaster, None}, "it is back"
        )
    after = embedded.status(data_dir)
    assert (after.supervisor, after.phase) == (before.supervisor, "ready")
    assert query(user.dsn, "select n from kept") == 42


def test_killed_backend_does_not_take_the_server_along(client, data_dir, query):
    user = client(data_dir)
    with psycopg.connect(user.dsn) as connection:
        kill(connection.info.backend_pid)
    wait_until(lambda: answers(query, user.dsn), "the server has recovered")
    assert embedded.status(data_dir).postmaster == user.ready()["postmaster"]


def test_kernel_stops_the_server_of_a_killed_supervisor(client, data_dir, query, kill_supervisor):
    user = client(data_dir)
    query(user.dsn, KEPT)
    kill_supervisor(data_dir)
    wait_until(lambda: server_processes(data_dir / "pgdata") == [], "the server is gone")
    assert user.process.poll() is None
    # The one who notices brings it back: the old client that looks, or a new one.
    assert query(user.tell("ensure")["dsn"], "select n from kept") == 42
    assert query(client(data_dir).dsn, "select n from kept") == 42


def test_start_right_after_the_supervisor_was_killed(data_dir, query, kill_supervisor):
    with embedded.start(data_dir) as server:
        query(server.dsn(), KEPT)
        for _ in range(3):
            kill_supervisor(data_dir)
            with embedded.start(data_dir) as another:  # the old server may still be stopping
                assert query(another.dsn(), "select n from kept") == 42


def test_all_killed_at_once(client, data_dir, query, kill_supervisor):
    clients = [client(data_dir), client(data_dir)]
    query(clients[1].dsn, KEPT)
    for pid in (embedded.status(data_dir).postmaster, *(each.process.pid for each in clients)):
        kill(pid)
    kill_supervisor(data_dir)
    with embedded.start(data_dir) as server:
        assert query(server.dsn(), "select n from kept") == 42


def test_client_killed_while_the_server_starts(client, gone, new_dir):
    early = client(new_dir)
    wait_until(lambda: (new_dir / "state.json").exists(), "the supervisor has begun")
    early.signal(signal.SIGKILL)
    gone(new_dir)  # it finished the start, saw that nobody waits, and left
    assert embedded.status(new_dir).exists


def test_supervisor_and_client_killed_during_initdb(client, new_dir, query, kill_supervisor):
    early = client(new_dir)
    wait_until(lambda: list(new_dir.glob("pgdata.new*/base")), "initdb works")
    early.signal(signal.SIGKILL)
    kill_supervisor(new_dir)
    assert not (new_dir / "pgdata").exists()
    with embedded.start(new_dir) as server:
        assert query(server.dsn(), "select 1") == 1
    assert list(new_dir.glob("pgdata.new*")) == []


def test_client_starts_again_when_its_supervisor_is_killed_while_starting(client, new_dir, query):
    user = client(new_dir)
    wait_until(lambda: list(new_dir.glob("pgdata.new*/base")), "initdb works")
    kill(embedded.status(new_dir).supervisor)
    assert query(user.dsn, "select 1") == 1


def test_directory_removed_under_the_server(client, new_dir, query):
    client(new_dir).ready()
    supervisor = embedded.status(new_dir).supervisor
    new_dir.rename(new_dir.with_name("removed"))
    with embedded.start(new_dir) as server:
        assert query(server.dsn(), "select 1") == 1
        assert embedded.status(new_dir).supervisor != supervisor
    wait_until(
        lambda: server_processes(new_dir.with_name("removed") / "pgdata") == [], "the old server leaves"
    )


def test_fork_of_a_client_keeps_the_lease(client, data_dir, gone):
    """A child that inherits the descriptor uses the server, too: the parent's close must not stop it."""
    parent = client(data_dir)
    parent.ready()
    child = parent.tell("fork")["child"]
    parent.tell("close")
    assert is_locked(data_dir / "lease")
    kill(child)
    gone(data_dir)


def test_a_server_that_crashes_at_once_is_started_more_and_more_slowly_and_one_that_ran_for_long_at_once():
    crashes, pauses = 0, []
    for _ in range(9):
        crashes, pause = after_crash(crashes, lived=1.0)
        pauses.append(pause)
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert after_crash(5000, lived=1.0)[1] == 5.0
    assert after_crash(crashes, lived=3600.0) == (1, 0.0)
