"""Client processes that a test can start, kill and ask; a data directory that must be left clean."""

import contextlib
import functools
import itertools
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import durable_actors
import psycopg
import pytest
from durable_actors._postgres.embedded import server as embedded
from durable_actors._postgres.embedded.files import try_lock
from durable_actors._postgres.embedded.process import server_processes
from durable_actors.testing.database import IN_MEMORY, MEMORY_NEEDED
from tests.kit import wait_until
from tests.warm import Program, warm

# Says "ready" with what it knows, then obeys one word per line until it is killed or its input ends.
CLIENT = """
import json, os, signal, sys
from durable_actors._postgres.embedded import server as embedded
from durable_actors._postgres.embedded import launch as embedded_launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
embedded_launch.GRACE_PERIOD = 0.3
server = embedded.start(sys.argv[1])
print(json.dumps({"dsn": server.dsn(), "postmaster": embedded.status(sys.argv[1]).postmaster}), flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        server.close()
    elif line.strip() == "ensure":
        server.ensure()
    child = os.fork() if line.strip() == "fork" else None
    if child == 0:
        signal.pause()
    print(json.dumps({"dsn": server.dsn(), "child": child}), flush=True)
"""


def is_locked(path: Path) -> bool:
    """Whether anybody holds the lock, shared or not."""
    handle = try_lock(path, exclusive=True)
    if handle is not None:
        os.close(handle)
    return handle is None


@attrs.frozen
class Person:
    """An operating system user that a client can run as."""

    name: str
    python: str = sys.executable
    popen: dict = attrs.field(factory=dict)


def _unprivileged_person() -> Person | None:
    """As root: `nobody`, with an interpreter that it can read (root's own may be closed to it)."""
    entry = pwd.getpwnam("nobody")
    popen = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        command = [python, "-c", "import psycopg_binary, attrs"]
        with contextlib.suppress(OSError):
            if subprocess.run(command, env=environment(), capture_output=True, **popen).returncode == 0:
                return Person("nobody", python, popen)
    return None


def environment(**more: str) -> dict[str, str]:
    """Everything importable from here, nothing of Postgres's own variables."""
    paths = [*sys.path, str(Path(durable_actors.__file__).parents[1])]
    known = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
    }
    return {**known, **more}


@functools.cache
def people() -> list[Person]:
    """Everybody this test run can act as: itself, and as root a normal user, too."""
    found = [Person("root" if os.geteuid() == 0 else "myself")]
    other = _unprivileged_person() if os.geteuid() == 0 else None
    return found if other is None else [*found, other]


class Client:
    def __init__(self, data_dir: Path, person: Person) -> None:
        ends = [os.pipe() for _ in range(3)]
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(ends[0][1], "w"),
            os.fdopen(ends[1][0]),
            os.fdopen(ends[2][0]),
        )
        theirs = [ends[0][0], ends[1][1], ends[2][1]]
        if person.popen:  # as somebody else, with an interpreter that they can read
            stdin, stdout, stderr = theirs
            self.process: subprocess.Popen | Program = subprocess.Popen(
                [person.python, "-c", CLIENT, str(data_dir)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment(),
                **person.popen,
            )
        else:
            self.process = warm().start(CLIENT, [str(data_dir)], theirs, env=environment())
        for each in theirs:
            os.close(each)
        self.hello: dict | None = None

    @property
    def dsn(self) -> str:
        return self.ready()["dsn"]

    def ready(self) -> dict:
        if self.hello is None:
            line = self.stdout.readline()
            assert line, self.stderr.read()
            self.hello = json.loads(line)
        return self.hello

    def tell(self, word: str) -> dict:
        self.stdin.write(word + "\n")
        self.stdin.flush()
        line = self.stdout.readline()
        assert line, self.stderr.read()
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Send it until it is heard: Python misses a Ctrl-C that comes just before a read begins to wait."""
        for _ in range(30):
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
                return
        self.process.wait(0)

    def errors(self) -> str:
        """What it wrote to stderr until it ended."""
        self.process.wait(30)
        return self.stderr.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                each.close()


@pytest.fixture(params=people(), ids=lambda person: person.name)
def person(request):
    return request.param


@pytest.fixture(scope="session")
def directories():
    """Makes directories that the server's user can reach; none may be left in use."""
    # In memory where there is room: fsync is on here, and a busy disk turns each stop into seconds.
    roomy = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > MEMORY_NEEDED
    base = Path(tempfile.mkdtemp(prefix="abuse-durable-", dir=IN_MEMORY if roomy else "/tmp"))
    base.chmod(0o711)
    numbers = itertools.count()

    @contextlib.contextmanager
    def make(user: int | None = None):
        directory = base / str(next(numbers)) / "data"
        directory.parent.mkdir()
        directory.parent.chmod(0o711)
        if user is not None:
            os.chown(directory.parent, user, -1)
        yield directory
        shutil.rmtree(directory.parent, ignore_errors=True)  # a supervisor may be deleting, too

    yield make
    shutil.rmtree(base)


@contextlib.contextmanager
def left_clean(directory: Path):
    """Afterwards nothing runs there; what does is a failure, and is ended all the same."""
    try:
        yield
        if directory.exists():
            embedded.stop(directory, force=True)
        assert server_processes(directory / "pgdata") == []
    finally:
        for pid in server_processes(directory / "pgdata"):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def old_directory(directories):
    with directories() as directory:
        yield directory


@pytest.fixture
def data_dir(old_directory):
    """A data directory that other tests have used: a start takes a tenth of a second."""
    with left_clean(old_directory):
        yield old_directory


@pytest.fixture
def new_dir(directories, request):
    """A data directory where nothing is yet: the first start runs initdb."""
    person = request.getfixturevalue("person") if "person" in request.fixturenames else None
    with directories(person and person.popen.get("user")) as directory, left_clean(directory):
        yield directory


@pytest.fixture
def client():
    """Start a client process: `client(directory)`, or `client(directory, person)`."""
    started = []

    def start(directory: Path, person: Person | None = None) -> Client:
        started.append(Client(directory, person or people()[0]))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def gone():
    """Wait until neither supervisor nor server is left."""

    def wait(directory: Path) -> None:
        wait_until(lambda: embedded.status(directory).phase == "stopped", "the supervisor ends")
        assert server_processes(directory / "pgdata") == []

    return wait


@pytest.fixture
def kill_supervisor():
    """SIGKILL, and wait until it took effect."""

    def kill(directory: Path) -> None:
        pid = embedded.status(directory).supervisor
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: embedded.status(directory).supervisor != pid, "the supervisor is dead")

    return kill


@pytest.fixture
def query():
    def run(dsn: str, statement: str):
        with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement)
            while cursor.nextset():
                pass
            return cursor.fetchone()[0] if cursor.description else None

    return run
