"""Starting and joining: many at once, odd paths, stale pid files, other users."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest
import trio
from durable_actors._postgres.embedded import launch as embedded_launch, server as embedded
from durable_actors._postgres.embedded.files import DataDir, default_data_dir, try_lock
from durable_actors._postgres.embedded.launch import socket_directory
from durable_actors._postgres.embedded.process import server_processes
from durable_actors.errors import ConfigError, StoreUnavailable
from tests.kit import wait_until
from tests.postgres.embedded.conftest import is_locked

pytestmark = pytest.mark.slow  # whole programs


def one(dsn, statement):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(statement).fetchone()[0]


def test_a_normal_user_and_root_can_both_run_it(client, person, new_dir):
    user = client(new_dir, person)
    assert user.process.poll() is None
    assert query_settings(user.dsn) == {
        "fsync": "on",
        "full_page_writes": "on",
        "listen_addresses": "",
        "max_connections": "200",
        "server_encoding": "UTF8",
        "synchronous_commit": "on",
    }
    cluster = (new_dir / "pgdata").stat()
    assert cluster.st_uid != 0
    assert cluster.st_mode & 0o777 == 0o700
    assert (new_dir / "run").stat().st_mode & 0o777 == 0o700


def query_settings(dsn):
    names = [
        "fsync",
        "full_page_writes",
        "listen_addresses",
        "max_connections",
        "server_encoding",
        "synchronous_commit",
    ]
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select name, setting from pg_settings where name = any(%s)", [names])
        return dict(rows.fetchall())


def test_eight_processes_start_together_on_a_new_directory(client, new_dir, gone):
    clients = [client(new_dir) for _ in range(8)]
    assert len({each.ready()["postmaster"] for each in clients}) == 1
    for each in clients:
        each.process.kill()
    gone(new_dir)


def test_threads_of_one_process_share_the_server(data_dir):
    servers = []
    threads = [threading.Thread(target=lambda: servers.append(embedded.start(data_dir))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({server.dsn() for server in servers}) == 1
    for server in servers[1:]:
        server.close()
    assert one(servers[0].dsn(), "select 1") == 1
    servers[0].close()


@pytest.mark.parametrize(
    ("name", "inside"),
    [("a space and 50%", True), ("ümläut", True), ("x" * 110, False), ("comma,quote'\"and\\", False)],
    ids=["space", "umlaut", "110 characters", "punctuation"],
)
def test_odd_paths(new_dir, name, inside):
    directory = new_dir / name
    with embedded.start(directory) as server:
        assert one(server.dsn(), "select 1") == 1
        assert one(server.dsn(application_name="it's me"), "show application_name") == "it's me"
    sockets = socket_directory(DataDir(directory), directory.joinpath("pgdata").stat().st_uid)
    assert sockets.is_relative_to(directory) == inside
    assert sockets.exists()
    embedded.stop(directory)
    assert sockets.exists() == inside


@pytest.mark.parametrize("owner", ["living stranger", "zombie", "nobody has it", "garbage"])
def test_stale_pid_files_are_seen_through(data_dir, owner, kill_supervisor):
    with embedded.start(data_dir):
        content = (data_dir / "pgdata/postmaster.pid").read_text().splitlines()
        kill_supervisor(data_dir)
        wait_until(lambda: server_processes(data_dir / "pgdata") == [], "the server is gone")
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if owner != "living stranger":
        stranger.communicate(b"\n") if owner == "nobody has it" else stranger.stdin.close()
        os.waitid(os.P_PID, stranger.pid, os.WEXITED | os.WNOWAIT) if owner == "zombie" else None
    content[0] = "not a number" if owner == "garbage" else str(stranger.pid)
    (data_dir / "pgdata/postmaster.pid").write_text("\n".join(content) + "\n")
    with embedded.start(data_dir) as server:
        assert one(server.dsn(), "select 1") == 1
    if owner == "living stranger":
        assert stranger.poll() is None
        stranger.stdin.close()
    stranger.wait()


def test_lock_files_left_behind_mean_nothing(data_dir):
    DataDir(data_dir).create()
    embedded.stop(data_dir)
    for name in ("lease", "start.lock", "supervisor.lock"):
        (data_dir / name).write_text("4711")
    (data_dir / "state.json").write_text(
        '{"phase": "ready", "supervisor": 1, "socket_dir": "/", "bin_dir": "/"}'
    )
    with embedded.start(data_dir) as server:
        assert one(server.dsn(), "select 1") == 1


def test_a_lock_that_is_never_given_back_ends_in_a_clear_error(data_dir):
    data = DataDir(data_dir)
    data.create()
    held = try_lock(data.start_lock, exclusive=True)
    with pytest.raises(StoreUnavailable, match=r"start\.lock is still locked"):
        embedded.start(data_dir, timeout=0.1)
    os.close(held)
    assert not is_locked(data.lease)


def test_a_server_that_cannot_start_says_why(data_dir):
    embedded.stop(data_dir)
    with pytest.raises(StoreUnavailable, match="not_a_setting"):
        embedded.start(data_dir, settings={"not_a_setting": "1"})
    with embedded.start(data_dir) as server:
        assert one(server.dsn(), "select 1") == 1


def test_a_second_start_is_cheap(data_dir):
    with embedded.start(data_dir), embedded.start(data_dir):
        started = time.perf_counter()
        for _ in range(20):
            embedded.start(data_dir).close()
        assert time.perf_counter() - started < 1.0  # measured: 0.4 ms each


async def test_open_embedded(data_dir):
    async with embedded.open_embedded(data_dir) as server:
        assert await trio.to_thread.run_sync(one, server.dsn(), "select 1") == 1
    assert embedded.status(data_dir).clients == ()


async def test_cancelled_start_leaves_no_lease(data_dir):
    with trio.CancelScope() as scope:
        scope.cancel()
        async with embedded.open_embedded(data_dir):
            raise AssertionError("cancelled before it began")
    assert scope.cancelled_caught
    assert embedded.status(data_dir).clients == ()


async def test_start_cancelled_half_way_leaves_no_lease(data_dir):
    embedded.stop(data_dir)
    DataDir(data_dir).create()
    lock = try_lock(DataDir(data_dir).start_lock, exclusive=True)  # holds the start at a known point
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def begin():
                async with embedded.open_embedded(data_dir):
                    raise AssertionError("cancelled while it began")

            while not is_locked(data_dir / "lease"):
                await trio.sleep(0.01)
            scope.cancel()
            os.close(lock)
    assert scope.cancelled_caught
    assert embedded.status(data_dir).clients == ()


async def test_keep_up_brings_the_server_back(data_dir):
    async with embedded.open_embedded(data_dir) as server, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: embedded.keep_up(server, interval=0.05))
        first = embedded.status(data_dir)
        os.kill(first.supervisor, 9)

        def back():
            now = embedded.status(data_dir)
            return now.phase == "ready" and now.supervisor != first.supervisor

        await trio.to_thread.run_sync(wait_until, back, "a new supervisor")
        nursery.cancel_scope.cancel()


def test_throwaway_directory_is_deleted_with_its_last_user(new_dir, monkeypatch):
    monkeypatch.setattr(embedded_launch, "GRACE_PERIOD", 0.1)
    with embedded.start(new_dir, throwaway=True) as server:
        assert one(server.dsn(), "show fsync") == "off"
    wait_until(lambda: not new_dir.exists(), "the directory is gone")


def test_start_while_the_throwaway_server_stops(new_dir, monkeypatch):
    monkeypatch.setattr(embedded_launch, "GRACE_PERIOD", 0.0)
    embedded.start(new_dir, throwaway=True).close()
    wait_until(lambda: embedded.status(new_dir).phase in {"stopping", "stopped"}, "it begins to stop")
    with embedded.start(new_dir, throwaway=True) as server:
        assert one(server.dsn(), "select 1") == 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DURABLE_DATA": "/srv/x"}, "/srv/x"),
        ({"DURABLE_DATA": "~/x"}, "~/x"),
        ({"XDG_DATA_HOME": "/data"}, "/data/durable_actors"),
        ({"XDG_DATA_HOME": "relative"}, "~/.local/share/durable_actors"),
        ({}, "~/.local/share/durable_actors"),
    ],
)
def test_default_data_dir_of_a_user(monkeypatch, environ, expected):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_data_dir(environ) == Path(expected).expanduser()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigError, match="set DURABLE_DATA"):
        default_data_dir({})


def test_default_data_dir_of_root_is_not_in_its_home(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert str(default_data_dir({})) == "/var/lib/durable_actors"


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="DURABLE_DATA"):
        embedded.start(tmp_path / "file" / "data")
