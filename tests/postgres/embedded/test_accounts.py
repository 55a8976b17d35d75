"""Who runs the server. As root the tests of root's way run here, as a normal user those of a user's way."""

import functools
import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from durable_actors._postgres.embedded import (
    account as embedded_account,
    launch as embedded_launch,
    server as embedded,
)
from durable_actors._postgres.embedded.account import check_reachable, readable_binaries, server_account
from durable_actors._postgres.embedded.binaries import Binaries, find_binaries
from durable_actors.errors import ConfigError

pytestmark = pytest.mark.slow  # whole programs

AS_ROOT = os.geteuid() == 0


def modes(*paths):
    return [stat.filemode(Path(path).stat().st_mode) for path in paths]


def link_or_copy(source, target):
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture
def closed_environment(directories):
    """The binaries inside a directory that only its owner can enter, as below /root."""
    found = find_binaries()
    with directories() as directory:
        closed = directory.parent / "closed"
        for part in found.parts:
            shutil.copytree(
                part, closed / part.relative_to(found.base), symlinks=True, copy_function=link_or_copy
            )
        closed.chmod(0o700)
        parts = tuple(closed / part.relative_to(found.base) for part in found.parts)
        bin_dir = closed / found.bin_dir.relative_to(found.base)
        yield Binaries(found.provider, found.version, bin_dir, parts, closed)


if AS_ROOT:

    def test_root_picks_an_unprivileged_user_that_exists(tmp_path):
        account = server_account(tmp_path / "none")
        assert account.name in {"postgres", "nobody"}
        assert account.uid not in {0, None}

    def test_an_existing_cluster_is_run_by_its_owner(tmp_path):
        os.chown(tmp_path, pwd.getpwnam("nobody").pw_uid, -1)
        assert server_account(tmp_path).name == "nobody"

    def test_programs_in_a_closed_directory_are_copied_once(closed_environment, new_dir, monkeypatch, query):
        cache = new_dir.parent / "cache"
        monkeypatch.setattr(embedded_launch, "find_binaries", lambda **_: closed_environment)
        copying = functools.partial(readable_binaries, cache=cache)
        monkeypatch.setattr(embedded_launch, "readable_binaries", copying)
        before = modes(closed_environment.base, closed_environment.bin_dir)
        with embedded.start(new_dir) as server:
            assert server.bin_dir.is_relative_to(cache)
            assert query(server.dsn(), "select 1") == 1
        assert modes(closed_environment.base, closed_environment.bin_dir) == before
        (copy,) = cache.iterdir()
        stamp = copy.stat().st_ctime_ns
        assert copying(closed_environment, server_account(new_dir / "none")) == server.bin_dir
        assert copy.stat().st_ctime_ns == stamp

    def test_two_who_copy_at_once_both_succeed(tmp_path):
        programs = tmp_path / "wheel" / "bin"
        programs.mkdir(parents=True)
        (programs / "initdb").write_text("")
        binaries = Binaries("wheel", "18.0", programs, (tmp_path / "wheel",), tmp_path)
        for _ in range(2):
            embedded_account._copy(binaries, tmp_path, tmp_path / "cache" / "one")
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["one"]

    def test_data_below_a_closed_directory_is_refused_and_left_alone(new_dir):
        closed = new_dir.parent / "closed"
        closed.mkdir(0o700)
        with pytest.raises(ConfigError, match="cannot reach the data directory"):
            embedded.start(closed / "data")
        assert modes(closed) == ["drwx------"]

    def test_no_account_and_no_permission_is_changed(data_dir):
        watched = ["/", "/root", "/tmp", "/etc/passwd", "/etc/group", data_dir.parent]
        before = modes(*watched), Path("/etc/passwd").read_bytes(), Path("/etc/group").read_bytes()
        with embedded.start(data_dir):
            assert (
                modes(*watched),
                Path("/etc/passwd").read_bytes(),
                Path("/etc/group").read_bytes(),
            ) == before

    def test_root_without_the_right_to_change_its_user(new_dir):
        """A hardened container: the server runs in a user namespace, or the error says what to do."""
        code = (
            "import sys, psycopg; from durable_actors._postgres.embedded import server as embedded\n"
            "with embedded.start(sys.argv[1]) as server, psycopg.connect(server.dsn()) as connection:\n"
            "    print(connection.execute('select 42').fetchone())"
        )
        drop = ["setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"]
        done = subprocess.run(
            [*drop, sys.executable, "-c", code, str(new_dir)], capture_output=True, text=True
        )
        assert done.stdout == "(42,)\n" or "CAP_SETUID" in done.stderr

else:

    def test_a_user_runs_the_server_itself(tmp_path):
        account = server_account(tmp_path)
        assert (account.uid, account.gid, account.wrapper) == (None, None, ())
        assert account.owner == os.geteuid()

    def test_a_user_needs_no_copy_and_no_check(closed_environment, tmp_path):
        account = server_account(tmp_path)
        check_reachable(tmp_path / "anything", account)
        assert readable_binaries(closed_environment, account) == closed_environment.bin_dir

    def test_a_directory_of_somebody_else_is_refused(tmp_path):
        with pytest.raises(ConfigError, match="set DURABLE_DATA"):
            embedded.start("/proc/durable")


def test_a_closed_directory_is_refused_with_a_remedy(client, person, new_dir):
    closed = new_dir.parent / "closed"
    closed.mkdir()
    closed.chmod(0o700 if AS_ROOT else 0)
    refused = client(closed / "data", person)
    errors = refused.errors()
    closed.chmod(0o700)
    assert "ConfigError" in errors
    assert "DURABLE_DATA" in errors


def test_no_unprivileged_user_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(embedded_account, "UNPRIVILEGED_USERS", ("no-such-user",))
    with pytest.raises(ConfigError, match="normal user"):
        server_account(tmp_path / "none")
