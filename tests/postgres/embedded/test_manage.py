"""status, stop, reset and the command line around them."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from durable_actors._postgres.embedded import server as embedded
from durable_actors.cli.pg import pg
from durable_actors.errors import ConfigError
from tests.postgres.embedded.conftest import is_locked

pytestmark = pytest.mark.slow  # whole programs


@pytest.fixture
def run(data_dir):
    """Run a command of the group on the test's directory; returns the click result."""

    def invoke(verb, *arguments, directory=data_dir, **options):
        return CliRunner().invoke(pg, [verb, "--data", str(directory), *arguments], **options)

    return invoke


def test_status_of_nothing(new_dir):
    found = embedded.status(new_dir)
    assert (found.exists, found.phase, found.clients, found.dsn) == (False, "stopped", (), None)
    assert not new_dir.exists(), "looking must not make anything"


def test_status_as_json(run, data_dir):
    with embedded.start(data_dir) as server:
        found = json.loads(run("status", "--json").output)
        assert found["phase"] == "ready"
        assert found["dsn"] == server.dsn()
        assert found["clients"] in ([os.getpid()], [])
        assert found["data_dir"] == str(data_dir)


def test_status_for_people(run, data_dir, new_dir):
    with embedded.start(data_dir):
        shown = run("status").output
    assert "ready" in shown
    assert str(data_dir) in shown
    assert "does not exist yet" in run("status", directory=new_dir).output


def test_stop_refuses_while_the_server_is_used(run, data_dir):
    with embedded.start(data_dir):
        with pytest.raises(ConfigError, match="is in use"):
            embedded.stop(data_dir)
        refused = run("stop")
        assert refused.exit_code == 1
        assert "--force" in str(refused.exception)
        assert embedded.status(data_dir).phase == "ready"
        assert run("stop", "--force").output == "stopped\n"
        assert embedded.status(data_dir).phase == "stopped"


def test_stop_is_quiet_on_request(run, data_dir):
    embedded.start(data_dir).close()
    assert run("stop", "--quiet").output == ""
    assert run("stop").output == "not running\n"
    assert embedded.stop(data_dir) is False


def test_reset_refuses_while_the_server_is_used(run, data_dir):
    with embedded.start(data_dir):
        refused = run("reset", "--yes")
    assert "is in use" in str(refused.exception)
    assert embedded.status(data_dir).exists


def test_reset_deletes_the_data_and_nothing_else(run, new_dir, query):
    with embedded.start(new_dir) as server:
        query(server.dsn(), "create table t ()")
    (new_dir / "mine.txt").write_text("not yours")
    assert run("reset", directory=new_dir, input="n\n").exit_code == 1
    assert embedded.status(new_dir).exists
    assert run("reset", "--yes", directory=new_dir).exit_code == 0
    assert not embedded.status(new_dir).exists
    assert (new_dir / "mine.txt").exists()
    with embedded.start(new_dir) as server:
        assert query(server.dsn(), "select count(*) from pg_class where relname = 't'") == 0
    assert "nothing to delete" in run("reset", "--yes", directory=new_dir / "other").output


def test_psql_keeps_the_lease_across_exec(data_dir):
    code = "import sys; from durable_actors.cli.pg import pg; sys.exit(pg())"
    command = [sys.executable, "-c", code, "psql", "--data", str(data_dir), "-At"]
    psql = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    psql.stdin.write("select 6 * 7;\n")
    psql.stdin.flush()
    assert psql.stdout.readline() == "42\n"
    assert is_locked(data_dir / "lease")
    psql.communicate()
    assert psql.returncode == 0
    assert not is_locked(data_dir / "lease")


def test_without_psql_the_error_says_what_to_do(run, data_dir, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    refused = run("psql")
    assert isinstance(refused.exception, ConfigError)
    assert "postgresql-client" in str(refused.exception)
    assert embedded.status(data_dir).clients == ()
