"""OTP-style actors and supervisors on Trio; no database.

Trio's nurseries propagate failures. This package adds restarts, a start and stop order, addresses that
survive a restart, and a graceful stop. docs/explanation/supervision.md explains how it works.

::

    store = otp.Address[Get | Put]("store", capacity=100, keep=True)
    steps = otp.Pool("steps", slots=10, on_exit=report)
    root = otp.Supervisor("app", [otp.ActorChild(store, Store), otp.PoolChild(steps)])

    async with otp.open_tree(root) as tree:
        await store.send(Put("x", "1"))
        value = await store.call(Get("x"))  # mypy and pyright infer str
        print(tree.snapshot().render())

Layout, bottom to top; imports go down only::

    _errors · _exit         the error tree · exit reasons
    _restart                pure: which children to restart, when to give up
    _call · _mailbox        calls and their reply slots · a bounded channel with time stamps
    _address                where messages are sent
    _timer · _events        periodic work · events of supervisors
    _snapshot               the tree as a value
    _child_spec             child specifications; plain functions as children
    _actor · _pool          actors · temporary tasks in slots, with `_pool_task`, `_watched` and `_pool_child`
    _child · _supervisor    one child of a supervisor · the supervisor
    _tree                   the root, and cancellation from outside
"""

from durable_actors.otp._actor import Actor, ActorChild
from durable_actors.otp._address import Address
from durable_actors.otp._call import Call
from durable_actors.otp._child_spec import ChildSpec, TaskChild
from durable_actors.otp._errors import (
    ActorDied,
    ActorDown,
    CallTimeout,
    MailboxClosed,
    MailboxFull,
    OtpError,
    PoolClosed,
    PoolFull,
    RestartLimitReached,
    SpecError,
    StartFailed,
    StartTimeout,
    StopFailed,
    TerminateTimeout,
)
from durable_actors.otp._events import (
    ChildExited,
    ChildRestarting,
    ChildStarted,
    Event,
    Observer,
    SupervisorGaveUp,
    log_event,
)
from durable_actors.otp._exit import Error, ExitReason, Normal, Shutdown
from durable_actors.otp._mailbox import Mailbox, MailboxStatistics
from durable_actors.otp._pool import Pool
from durable_actors.otp._pool_child import PoolChild
from durable_actors.otp._pool_task import ContextReset, PoolTask
from durable_actors.otp._restart import Backoff
from durable_actors.otp._snapshot import Node, PoolStatistics, SupervisorStatistics
from durable_actors.otp._supervisor import Supervisor
from durable_actors.otp._timer import periodic
from durable_actors.otp._tree import Tree, open_tree, run_tree

__all__ = [
    "Actor",
    "ActorChild",
    "ActorDied",
    "ActorDown",
    "Address",
    "Backoff",
    "Call",
    "CallTimeout",
    "ChildExited",
    "ChildRestarting",
    "ChildSpec",
    "ChildStarted",
    "ContextReset",
    "Error",
    "Event",
    "ExitReason",
    "Mailbox",
    "MailboxClosed",
    "MailboxFull",
    "MailboxStatistics",
    "Node",
    "Normal",
    "Observer",
    "OtpError",
    "Pool",
    "PoolChild",
    "PoolClosed",
    "PoolFull",
    "PoolStatistics",
    "PoolTask",
    "RestartLimitReached",
    "Shutdown",
    "SpecError",
    "StartFailed",
    "StartTimeout",
    "StopFailed",
    "Supervisor",
    "SupervisorGaveUp",
    "SupervisorStatistics",
    "TaskChild",
    "TerminateTimeout",
    "Tree",
    "log_event",
    "open_tree",
    "periodic",
    "run_tree",
]


def _fix_modules() -> None:
    """Show the public import path in tracebacks, reprs and the documentation."""
    for name in __all__:
        public = globals()[name]
        if getattr(public, "__module__", "").startswith(f"{__name__}."):
            public.__module__ = __name__


_fix_modules()
