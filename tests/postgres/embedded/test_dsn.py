"""`embedded_dsn`: plain connections are users of the embedded server, too."""

import os
import threading
from pathlib import Path

import durable_actors as da
import psycopg
import pytest
from durable_actors._postgres.embedded import server as embedded
from tests.postgres.embedded.conftest import environment
from tests.warm import warm

pytestmark = pytest.mark.slow  # whole programs

# Ends its connection at once; says its address again at each line until its input ends.
CLIENT = """
import sys, psycopg
import durable_actors as da
from durable_actors._postgres.embedded import launch as embedded_launch
embedded_launch.GRACE_PERIOD = 0.3
psycopg.connect(da.embedded_dsn()).close()
print(da.embedded_dsn("other"), flush=True)
for line in sys.stdin:
    print(da.embedded_dsn(), flush=True)
"""


@pytest.fixture
def asker(data_dir):
    """A process that asks for the address; its input and output."""
    ends = [os.pipe() for _ in range(3)]
    theirs = [ends[0][0], ends[1][1], ends[2][1]]
    process = warm().start(CLIENT, [], theirs, env=environment(DURABLE_DATA=str(data_dir)))
    for each in theirs:
        os.close(each)
    with (
        os.fdopen(ends[0][1], "w") as stdin,
        os.fdopen(ends[1][0]) as stdout,
        os.fdopen(ends[2][0]) as stderr,
    ):
        yield process, stdin, stdout, stderr
        process.kill()
        process.wait()


def test_the_process_is_a_user_as_long_as_it_lives(asker, data_dir, gone):
    process, stdin, stdout, stderr = asker
    first = stdout.readline()
    assert "dbname=other" in first, stderr.read()
    found = embedded.status(data_dir)
    assert process.pid in found.clients
    with pytest.raises(da.ConfigError, match="is in use"):
        embedded.stop(data_dir)
    stdin.write("again\n")
    stdin.flush()
    with psycopg.connect(stdout.readline()) as conn:
        assert conn.execute("select 1").fetchone() == (1,)
    assert embedded.status(data_dir).postmaster == found.postmaster
    process.kill()
    process.wait()
    gone(data_dir)


def test_a_killed_supervisor_is_noticed_by_the_next_call(asker, data_dir, kill_supervisor):
    _, stdin, stdout, stderr = asker
    assert stdout.readline(), stderr.read()
    kill_supervisor(data_dir)
    stdin.write("again\n")
    stdin.flush()
    with psycopg.connect(stdout.readline()) as conn:
        assert conn.execute("select 1").fetchone() == (1,)


def test_one_lease_however_often_it_is_called(monkeypatch):
    started = []

    class Server:
        def dsn(self, dbname: str) -> str:
            return f"dbname={dbname}"

        def ensure(self) -> None:
            started.append("ensured")

    def start(data_dir: Path) -> Server:
        started.append(data_dir)
        return Server()

    monkeypatch.setattr(embedded, "start", start)
    monkeypatch.setattr(embedded, "_servers", {})
    monkeypatch.setenv("DURABLE_DATA", "/a")
    threads = [threading.Thread(target=da.embedded_dsn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert started == [Path("/a"), "ensured", "ensured"]
    monkeypatch.setenv("DURABLE_DATA", "/b")
    assert da.embedded_dsn("x") == "dbname=x"
    assert started[-1] == Path("/b")


def test_it_may_be_forbidden(monkeypatch):
    monkeypatch.setenv("DURABLE_EMBEDDED", "0")
    with pytest.raises(da.ConfigError, match="DURABLE_EMBEDDED=0"):
        da.embedded_dsn()
