"""A server that asks for TLS and for a SCRAM password.

The wheel's server speaks no TLS: one that does is the system's, or the one that DURABLE_PG_BIN names (`.ci/run` has
one). Without it, or without openssl to make a certificate, there is nothing to collect.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import psycopg
import pytest
import trio
from durable_actors._postgres.embedded.binaries import Binaries, _candidates
from durable_actors._store.migrate import migrate
from psycopg.conninfo import make_conninfo
from tests.chaos.cluster import Cluster, free_port, open_cluster

PASSWORD = "s3cret 'of' ünïcode"
HBA = "local all all trust\nhostssl all app 127.0.0.1/32 scram-sha-256\n"


def tls_binaries() -> Binaries | None:
    """The first server that was built with OpenSSL."""
    found = (
        each for each in _candidates(os.environ) if b"libssl" in (each.bin_dir / "postgres").read_bytes()
    )
    return next(found, None)


BINARIES = tls_binaries()
OPENSSL = shutil.which("openssl")
collect_ignore_glob = [] if BINARIES and OPENSSL else ["test_*.py"]


@attrs.frozen
class Secure:
    """The server, and the way to it."""

    cluster: Cluster
    dsn: str
    """By TLS, verified, with the password; a database with the schema in place."""
    certificate: Path

    def way(self, **options: object) -> str:
        return make_conninfo(self.dsn, **options)


@pytest.fixture(scope="module")
def secure() -> Iterator[Secure]:
    port = free_port()
    with open_cluster({"listen_addresses": "127.0.0.1", "port": str(port)}, binaries=BINARIES) as cluster:
        certificate = make_certificate(cluster)
        with psycopg.connect(cluster.dsn(port=port), autocommit=True) as conn:
            conn.execute("set password_encryption = 'scram-sha-256'")
            conn.execute(psycopg.sql.SQL("create role app login superuser password {}").format(PASSWORD))
            for name, value in (
                ("ssl", "on"),
                ("ssl_cert_file", "../tls.crt"),
                ("ssl_key_file", "../tls.key"),
            ):
                conn.execute(psycopg.sql.SQL(f"alter system set {name} = {{}}").format(value))
            (cluster.pgdata / "pg_hba.conf").write_text(HBA)
            conn.execute("select pg_reload_conf()")
        trio.run(migrate, cluster.dsn(port=port))
        dsn = make_conninfo(
            host="localhost", hostaddr="127.0.0.1", port=port, user="app", password=PASSWORD, dbname="postgres",
            sslmode="verify-full", sslrootcert=str(certificate),
        )  # fmt: skip
        yield Secure(cluster, dsn, certificate)


def make_certificate(cluster: Cluster) -> Path:
    key, certificate = cluster.place / "tls.key", cluster.place / "tls.crt"
    assert OPENSSL is not None
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost"]
    command = [OPENSSL, *options.split(), *names, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    if cluster.account.uid is not None and cluster.account.gid is not None:
        os.chown(key, cluster.account.uid, cluster.account.gid)
    key.chmod(0o600)
    certificate.chmod(0o644)
    return certificate
