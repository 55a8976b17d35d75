"""What the actors of one engine share, passed to them explicitly."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from durable_actors._engine.claiming.idle_queues import IdleQueues
from durable_actors._engine.claims import ActiveClaims
from durable_actors._engine.running.step_inputs import InputLoader
from durable_actors._engine.running.threads import Threads
from durable_actors._engine.store_health import StoreHealth
from durable_actors._option_checks import shown
from durable_actors._postgres.driver import encode
from durable_actors._postgres.pool.lane import Lane
from durable_actors._postgres.pool.patience import CALLER, CALLERS, PATIENCE
from durable_actors._postgres.pool.pool import Pool
from durable_actors._store.claim import Owner
from durable_actors._store.rows import Promoted
from durable_actors.config import Config
from durable_actors.machine import ContextPort, MachineSpec, Registry, parse_step_address, step_address
from durable_actors.otp import Address
from durable_actors.telemetry import Telemetry

if TYPE_CHECKING:
    from durable_actors._engine.claiming.feeder import Feeder

logger: Final = logging.getLogger("durable_actors.engine")

# The planner of a queue table: statistics say "almost no row is executing" or "the table is empty" and are right a
# minute later. Generic plans with index paths are right always (docs/explanation/performance.md).
_PLANS: Final = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}

SHORTEST_PATIENCE: Final = 5.0
SHORTEST_BEAT: Final = 2.0
"""Seconds, of the patience with heartbeats."""
MOST_WARNINGS: Final = 100
"""Steps that a node does not know and tells of; somebody who writes rows by hand could fill the log."""


class MachineCatalog:
    """The machines and steps that this node can run, in the forms in which they are needed.

    A class that is defined while the engine runs is known from the next pick on.
    """

    __slots__ = ("_generation", "_own", "_registry", "_specs", "_warned", "array", "names")

    def __init__(self, registry: Registry, own: Mapping[tuple[str, int], MachineSpec]) -> None:
        self._registry = registry
        self._own = dict(own)
        self._generation = -1
        self._specs: dict[tuple[str, int], MachineSpec] = {}
        self._warned: set[str] = set()
        self.names: frozenset[str] = frozenset()
        """The addresses of their steps (`step_address`): the pick claims no row at another one."""
        self.array = b"{}"
        """The same as a parameter."""
        self.refresh()

    def refresh(self) -> None:
        """Take in what was defined since. Costs one comparison when nothing was."""
        if self._generation == self._registry.generation:
            return
        self._generation = self._registry.generation
        self._specs = {**self._own, **self._registry.specs}
        steps = [address for spec in self._specs.values() for address in spec.addresses]
        self.array = encode.text_array(sorted(steps))
        # And those on the shelf of which only the machine was noted.
        self.names = frozenset([*steps, *(step_address(*key, "") for key in self._specs)])

    def find(self, fsm: str, version: int) -> MachineSpec | None:
        """The definition of a claimed row. The pick claims no other; None after one was forgotten since."""
        return self._specs.get((fsm, version))

    @property
    def steps(self) -> dict[str, list[str]]:
        """For people: the steps of each machine, by "name/version"."""
        return {f"{spec.name}/{spec.version}": list(spec.steps) for spec in self._specs.values()}

    def explain_unknown(self, shelved: Sequence[str]) -> list[str]:
        """A sentence for each of these step addresses that this node cannot run, the first time that it is met."""
        fresh = [each for each in shelved if each not in self.names and each not in self._warned]
        del fresh[max(MOST_WARNINGS - len(self._warned), 0) :]
        self._warned.update(fresh)
        return [_unknown_text(each, self._specs) for each in fresh]


def _unknown_text(address: str, specs: Mapping[tuple[str, int], MachineSpec]) -> str:
    """What of an address is unknown here. Pure."""
    parsed = parse_step_address(address)
    if parsed is None:
        return f"this node does not know {shown(address)}"
    name, version, step = parsed
    spec = specs.get((name, version))
    if spec is not None:
        return (
            f"this node's code does not have step {shown(step)} of machine {shown(name)} version {version} "
            f"(it has {', '.join(spec.steps)})"
        )
    versions = sorted(each for known, each in specs if known == name)
    have = f" (it has version {', '.join(map(str, versions))})" if versions else ""
    text = f"this node does not know machine {shown(name)} version {version}{have}"
    if name.startswith("__main__:"):
        text += (
            "; it was defined in a script that was run by its path: define it in a module that this worker imports, "
            "too, or give it a name="
        )
    return text


def answer_patience(lease_ttl: float) -> float:
    """Seconds for which the engine waits for an answer to what it asks. Pure.

    Half a lease; not less than what a loaded server may take. One connection may fall silent while the others work (a
    firewall forgot it): the leases would be renewed for ever, and nothing would be committed or picked.
    """
    return max(lease_ttl / 2, SHORTEST_PATIENCE)


def lanes(pool_size: int, *, session_dsn: str | None, keepalive: float) -> dict[str, Lane]:
    """Share the node's connections out: which lane each role uses. Pure.

    Session locks and heartbeats never share; then commits, then claims get a connection of their own; what is left
    is for clients and maintenance.
    """
    keep = max(1, int(keepalive / 4))
    patience = answer_patience(keepalive)
    session = {
        "tcp_keepalives_idle": str(keep),
        "tcp_keepalives_interval": str(keep),
        "tcp_keepalives_count": "2",
    }
    # Whoever waits for a lock here holds up the renewal of every lease: see the heartbeat.
    beats = _PLANS | PATIENCE
    heartbeat = Lane("heartbeat", 1, settings=beats, answer_within=max(keepalive / 2, SHORTEST_BEAT))
    found = {
        "session": Lane("session", 1, settings=session, dsn=session_dsn),
        "heartbeat": heartbeat,
    }
    # A process that is stopped in the middle of a transaction must not hold its rows for longer than its lease: nobody
    # could take them back.
    idle = {"idle_in_transaction_session_timeout": str(max(1, int(keepalive * 500)))}
    # A row that a caller's open transaction has locked must hold up nobody else: see the flusher, and `patience`.
    both = _PLANS | PATIENCE | idle
    shared = Lane("shared", 1, settings=both, max_waiting=CALLERS, answer_within=patience)
    rest = pool_size - 2
    commit = Lane("commit", 1, settings=both, answer_within=patience)
    found["commit"] = commit if rest > 1 else shared
    # Picks of all queues share it: nothing there may wait for a lock either.
    found["claim"] = Lane("claim", 1, settings=both, answer_within=patience) if rest > 2 else shared
    found["client"] = (
        Lane("client", rest - 2, settings=CALLER | idle, max_waiting=CALLERS) if rest > 2 else shared
    )
    return found


@attrs.define(eq=False)
class Node:
    """One engine's shared parts."""

    config: Config
    owner: Owner
    pool: Pool
    roles: Mapping[str, Lane]
    catalog: MachineCatalog
    telemetry: Telemetry
    port: ContextPort
    inputs: InputLoader
    claims: ActiveClaims
    feeders: dict[str, Feeder] = attrs.field(factory=dict[str, "Feeder"])
    idle_queues: IdleQueues = attrs.field(factory=IdleQueues)
    """Which feeders sleep and have room: the long poll watches their queues."""
    wakes: dict[str, Address[object]] = attrs.field(factory=dict[str, Address[object]])
    about: Mapping[str, object] = attrs.field(factory=dict[str, object])
    """What its row in `nodes` tells people."""
    registered: bool = True
    """That row is there. Else it was locked when the engine started, and the heartbeat writes it."""
    draining: bool = False
    """Nothing is claimed any more, and no step runs ahead."""
    health: StoreHealth = attrs.field(factory=StoreHealth)
    """Whether the store can be reached."""
    random: Callable[[], float] = random.random
    threads: Threads = attrs.field(init=False)
    """Those of `def` steps."""
    leaks_told: set[tuple[str, int, str]] = attrs.field(factory=set[tuple[str, int, str]])
    """Steps (machine, version, step) that have left something open in their task, and of which it was said."""
    on_fatal: Callable[[BaseException], None] = attrs.field(default=lambda _: None)
    """A step raised KeyboardInterrupt: the node must stop."""
    on_final: Callable[[int], None] = attrs.field(default=lambda _: None)
    """An instance became terminal here: whoever waits for its result may look."""

    def __attrs_post_init__(self) -> None:
        self.threads = Threads(self.config.thread_limit)

    def lane(self, role: str) -> str:
        """The name of the lane that a role uses."""
        return self.roles[role].name

    def poke(
        self,
        queue: str,
        /,
        *,
        number: int | None = None,
        priority: int | None = None,
        plain: bool = False,
        woken: bool = False,
    ) -> None:
        """Hint that work may be there, after it was committed (`PickCursor.hint`). Coalesced; polling is the floor."""
        feeder = self.feeders.get(queue)
        if feeder is not None:
            feeder.cursor.hint(number, priority, plain=plain, woken=woken)
            self.wakes[queue].cast(None)

    def expect_deadline(self, queue: str) -> None:
        """An instance was parked here with a deadline: the feeder must look when its next one is."""
        feeder = self.feeders.get(queue)
        if feeder is not None:
            feeder.look_for_deadlines()
            self.wakes[queue].cast(None)

    def offer(self, promoted: list[Promoted]) -> None:
        """Tell the feeders here of rows that are on offer again."""
        for row in promoted:
            self.poke(row.queue, number=row.id)
