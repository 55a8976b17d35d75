"""Embedded Postgres as root: which user runs the server, and from which directory.

Postgres refuses to run as root. We create no account and change no permission of a directory that is not ours: an
existing unprivileged user runs the server. If that user cannot read the programs (a virtual environment in root's home
directory), they are copied once to a cache.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import attrs

from durable_actors._postgres.embedded.binaries import Binaries, installed_version
from durable_actors.errors import ConfigError

UNPRIVILEGED_USERS = ("postgres", "nobody")
PROGRAM_CACHE = Path("/var/cache/durable_actors")


@attrs.frozen
class Account:
    """The user that runs initdb and postgres."""

    name: str
    uid: int | None = None
    """Change to this user; None: stay the current user."""
    gid: int | None = None
    wrapper: tuple[str, ...] = ()
    """Prefix of the commands, where root may not change its user."""

    @property
    def owner(self) -> int:
        """Owner of the server's files, as this process sees it."""
        return os.geteuid() if self.uid is None else self.uid


def server_account(cluster: Path) -> Account:
    """The current user. As root: the owner of an existing cluster, else ``postgres``, else ``nobody``.

    The owner comes first, because a cluster made by ``nobody`` must stay usable when the system gets a ``postgres``
    user later. Root without the right to change its user (a hardened container) uses a user namespace.
    """
    if os.geteuid() != 0:
        return Account("the current user")
    names: list[str] = [*UNPRIVILEGED_USERS]
    ours = False
    with contextlib.suppress(FileNotFoundError, KeyError):
        owner = cluster.stat().st_uid
        ours = owner == 0  # made in a user namespace: only there does it belong to the server's user
        names.insert(0, pwd.getpwuid(owner).pw_name)
    for name in names:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            if entry.pw_uid != 0:
                return _mapped(entry) if ours else _permitted(entry)
    raise ConfigError(
        "Postgres does not run as root, and this system has neither a `postgres` nor a `nobody` user; "
        "run as a normal user, or set DURABLE_DSN to use your own server",
        option="dsn",
        value="embedded",
    )


def check_reachable(path: Path, account: Account) -> None:
    """Raise ConfigError if the server's user cannot reach the data directory."""
    if account.uid is None or _runs(["/bin/sh", "-c", 'cd -- "$1"', "sh", str(path)], account):
        return
    raise ConfigError(
        f"as root the server runs as user {account.name!r}, who cannot reach the data directory {path}: "
        "a parent directory is not accessible to other users. Set DURABLE_DATA to one under /var/lib, or run as a "
        "normal user",
        option="DURABLE_DATA",
        value=str(path),
    )


def readable_binaries(binaries: Binaries, account: Account, *, cache: Path = PROGRAM_CACHE) -> Path:
    """A directory of programs that this user can run: the original one, or a copy that is made once."""
    if account.uid is None or _runs([str(binaries.bin_dir / "initdb"), "--version"], account):
        return binaries.bin_dir
    if binaries.base is None:
        raise ConfigError(
            f"user {account.name!r}, who runs the server, cannot read the programs in {binaries.bin_dir}",
            option="DURABLE_PG_BIN",
            value=str(binaries.bin_dir),
        )
    where = hashlib.sha256(os.fsencode(binaries.base)).hexdigest()[:8]
    version = installed_version(binaries.provider) or binaries.version
    copy = cache / f"{binaries.provider}-{version}-{where}"
    bin_dir = copy / binaries.bin_dir.relative_to(binaries.base)
    if not bin_dir.is_dir():
        _copy(binaries, binaries.base, copy)
    if not _runs([str(bin_dir / "initdb"), "--version"], account):
        text = f"user {account.name!r} cannot run the copy of the Postgres programs in {bin_dir}"
        raise ConfigError(text, option="dsn", value="embedded")
    return bin_dir


def _permitted(entry: pwd.struct_passwd) -> Account:
    """The account that changes to the user, if that is allowed."""
    account = Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    try:
        _run(["/bin/sh", "-c", ":"], account)
    except PermissionError as exc:
        if exc.errno != errno.EPERM:
            raise
        return _mapped(entry)
    return account


def _mapped(entry: pwd.struct_passwd) -> Account:
    """The account that maps root to this user in a user namespace."""
    maps = (f"--map-user={entry.pw_uid}", f"--map-group={entry.pw_gid}")
    mapped = Account(entry.pw_name, wrapper=("unshare", "--user", *maps, "--"))
    if shutil.which("unshare") and _runs(["/bin/sh", "-c", ":"], mapped):
        return mapped
    raise ConfigError(
        "Postgres does not run as root, and this process may neither change its user (CAP_SETUID) nor create a "
        "user namespace; run as a normal user, or set DURABLE_DSN to use your own server",
        option="dsn",
        value="embedded",
    )


def _copy(binaries: Binaries, base: Path, copy: Path) -> None:
    """Copy to a temporary directory, then rename: concurrent copies are safe, and readers see all or nothing."""
    copy.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=copy.name, dir=copy.parent))
    unneeded = shutil.ignore_patterns("include", "*.a", "doc", "__pycache__")
    try:
        for part in binaries.parts:
            shutil.copytree(part, temporary / part.relative_to(base), symlinks=True, ignore=unneeded)
        temporary.chmod(0o755)
        try:
            temporary.rename(copy)
        except OSError:
            if not copy.is_dir():  # another process was faster: its copy is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _runs(command: list[str], account: Account) -> bool:
    """Whether the command succeeds as this user."""
    try:
        return _run(command, account) == 0
    except PermissionError:
        return False


def _run(command: list[str], account: Account) -> int:
    """Exit code of the command as this user; the child drops its privileges before it opens the program."""
    done = subprocess.run(  # noqa: S603 - our own commands
        [*account.wrapper, *command],
        user=account.uid,
        group=account.gid,
        extra_groups=None if account.uid is None else [],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return done.returncode
