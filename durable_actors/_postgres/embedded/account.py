"""Embedded Postgres as root: who runs the server, and from where.

Postgres refuses to run as root. No account is created and no permission of a directory that is not ours is
changed: an existing unprivileged user runs it, and where that user cannot read the programs (a virtual
environment under ``/root``), they are copied once to a cache.
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
    """Who runs initdb and postgres."""

    name: str
    uid: int | None = None
    """Change to this user; None: stay who we are."""
    gid: int | None = None
    wrapper: tuple[str, ...] = ()
    """Put before the commands, where root may not change its user."""

    @property
    def owner(self) -> int:
        """Who owns the server's files, seen from here."""
        return os.geteuid() if self.uid is None else self.uid


def server_account(cluster: Path) -> Account:
    """Ourselves. As root: the owner of the cluster that is there, else ``postgres``, else ``nobody``.

    The owner comes first because a system that gets a ``postgres`` user later must still open what
    ``nobody`` made. Root without the right to change its user (a hardened container) gets a user namespace.
    """
    if os.geteuid() != 0:
        return Account("the current user")
    names: list[str] = [*UNPRIVILEGED_USERS]
    ours = False
    with contextlib.suppress(FileNotFoundError, KeyError):
        owner = cluster.stat().st_uid
        ours = owner == 0  # made in a user namespace: only there is it the server's own
        names.insert(0, pwd.getpwuid(owner).pw_name)
    for name in names:
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            if entry.pw_uid != 0:
                return _mapped(entry) if ours else _permitted(entry)
    raise ConfigError(
        "Postgres does not run as root, and this system has neither a `postgres` nor a `nobody` user; "
        "run as a normal user, or set DURABLE_DSN to use a server of your own",
        option="dsn",
        value="embedded",
    )


def check_reachable(path: Path, account: Account) -> None:
    """Raise ConfigError when the server's user cannot pass through to the data directory."""
    if account.uid is None or _runs(["/bin/sh", "-c", 'cd -- "$1"', "sh", str(path)], account):
        return
    raise ConfigError(
        f"as root the server runs as user {account.name!r}, who cannot reach the data directory {path}: "
        "a directory above it is closed to others. Set DURABLE_DATA to one under /var/lib, or run as a "
        "normal user",
        option="DURABLE_DATA",
        value=str(path),
    )


def readable_binaries(binaries: Binaries, account: Account, *, cache: Path = PROGRAM_CACHE) -> Path:
    """The directory of programs that this user can run: the original one, or a copy made once."""
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
    """The account, by changing to the user where that is allowed."""
    account = Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    try:
        _run(["/bin/sh", "-c", ":"], account)
    except PermissionError as exc:
        if exc.errno != errno.EPERM:
            raise
        return _mapped(entry)
    return account


def _mapped(entry: pwd.struct_passwd) -> Account:
    """Root that looks like this user from inside a user namespace."""
    maps = (f"--map-user={entry.pw_uid}", f"--map-group={entry.pw_gid}")
    mapped = Account(entry.pw_name, wrapper=("unshare", "--user", *maps, "--"))
    if shutil.which("unshare") and _runs(["/bin/sh", "-c", ":"], mapped):
        return mapped
    raise ConfigError(
        "Postgres does not run as root, and this process may neither change its user (CAP_SETUID) nor make a "
        "user namespace; run as a normal user, or set DURABLE_DSN to use a server of your own",
        option="dsn",
        value="embedded",
    )


def _copy(binaries: Binaries, base: Path, copy: Path) -> None:
    """Copy beside the final place, then rename: two may do it at once, a third sees all or nothing."""
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
            if not copy.is_dir():  # another process was quicker: its copy is as good
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _runs(command: list[str], account: Account) -> bool:
    """Whether the command succeeds as that user."""
    try:
        return _run(command, account) == 0
    except PermissionError:
        return False


def _run(command: list[str], account: Account) -> int:
    """Exit code of the command as that user; the child drops its rights before it looks at the program."""
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
