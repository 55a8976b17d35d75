"""Nemeses: what is done to a run, by name. Every module of this folder registers its own when it is imported.

::

    @nemesis("kill")                               # a database on the shared server
    async def kill(world: World) -> None:
        '''SIGKILL of one worker after the other.'''
        while await world.pause(0.3, 1.0):         # False when the time for faults is over
            if (worker := world.pick()) is not None:
                world.kill(worker)                 # counted; another one takes its place

    @nemesis("restart", private=True, settings={"max_connections": "50"}, outages=True)
    @nemesis("blackhole", proxy=True, outages=True)
    @nemesis("failover", place=open_pair, outages=True)

A nemesis ends by itself when the time for faults is over and leaves the world healed: what it broke works again, what
it stopped runs. It counts what it does with `world.count(kind)`. Its randomness is `world.rng`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from tests.chaos.world import Place, World

Attack = Callable[["World"], Awaitable[None]]
OpenPlace = Callable[[Path], AbstractAsyncContextManager["Place"]]
"""Makes the Postgres of a run, with an empty database; the folder is the run's own."""


@attrs.frozen(kw_only=True)
class Nemesis:
    """One way to break things."""

    name: str
    attack: Attack
    private: bool = False
    """The run has a Postgres server of its own, which may be hurt."""
    settings: Mapping[str, str] = attrs.field(factory=dict)
    """Of that server."""
    place: OpenPlace | None = None
    """Makes the run's Postgres when one server is not enough."""
    proxy: bool = False
    """Workers and senders go through `world.proxy`."""
    outages: bool = False
    """Postgres is away at times: a worker that starts just then may end, and is started again."""
    workers: int = 3
    worker_options: tuple[str, ...] = ()
    """Further options of every worker (tests.chaos.worker)."""
    seconds: float | None = None
    """How long faults are injected, when it must not be the runner's default."""
    retention: float | None = None
    """Seconds for which workers keep what has ended; None: for longer than any run takes."""
    afterwards: Attack | None = None
    """Runs when faults and senders have ended, until all work has: what the attack itself must put right."""
    forgives: frozenset[str] = frozenset()
    """Invariants that cannot hold here; say why at the place where it is set."""

    @property
    def options_of_workers(self) -> tuple[str, ...]:
        """All options of every worker."""
        kept = () if self.retention is None else ("--retention", f"{self.retention:g}")
        return (*self.worker_options, *kept)

    @property
    def about(self) -> str:
        """What it does, in a line."""
        return (self.attack.__doc__ or "").strip().partition("\n")[0]


_registered: dict[str, Nemesis] = {}


def nemesis(
    name: str,
    *,
    private: bool = False,
    settings: Mapping[str, str] | None = None,
    place: OpenPlace | None = None,
    proxy: bool = False,
    outages: bool = False,
    workers: int = 3,
    worker_options: tuple[str, ...] = (),
    seconds: float | None = None,
    retention: float | None = None,
    afterwards: Attack | None = None,
    forgives: frozenset[str] = frozenset(),
) -> Callable[[Attack], Attack]:
    """Register an attack under this name; the fields of `Nemesis` say what the options mean."""

    def register(attack: Attack) -> Attack:
        if name in _registered:
            raise ValueError(f"there are two nemeses {name!r}")
        _registered[name] = Nemesis(
            name=name,
            attack=attack,
            private=private or bool(settings),
            settings=dict(settings or {}),
            place=place,
            proxy=proxy,
            outages=outages,
            workers=workers,
            worker_options=worker_options,
            seconds=seconds,
            retention=retention,
            afterwards=afterwards,
            forgives=forgives,
        )
        return attack

    return register


def nemeses() -> dict[str, Nemesis]:
    """All of them, by name."""
    for module in sorted(each.name for each in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    return dict(_registered)
