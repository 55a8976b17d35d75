"""A scripted actor, and a trace of what happens in a tree."""

from __future__ import annotations

from typing import Any

import attrs
import trio
from durable_actors import otp


class ScriptError(ValueError):
    """Raised because a test said so."""


@attrs.frozen
class Crash:
    error: BaseException = attrs.field(factory=lambda: ScriptError("crash"))


@attrs.frozen
class Quit:
    pass


@attrs.frozen
class Hold:
    """Wait inside `handle`."""

    until: trio.Event


@attrs.frozen
class Note:
    text: str


@attrs.frozen
class Ask(otp.Call[str]):
    text: str = "?"


@attrs.frozen
class Ignore(otp.Call[str]):
    """Taken, never answered."""


@attrs.frozen
class CrashCall(otp.Call[str]):
    error: Exception = attrs.field(factory=lambda: ScriptError("crash"))


Msg = Crash | Quit | Hold | Note | Ask | Ignore | CrashCall


@attrs.define(eq=False)
class Script:
    """How the incarnations of an actor behave; shared by all of them."""

    name: str
    log: list[str]
    fail_init: int = 0
    """So many inits fail."""
    slow_init: float = 0
    slow_terminate: float = 0
    fail_terminate: Exception | None = None
    alive: int = 0
    taken: list[object] = attrs.field(factory=list)


@attrs.define(eq=False)
class Scripted(otp.Actor[Msg]):
    script: Script

    async def init(self) -> None:
        script = self.script
        script.log.append(f"init {script.name}")
        assert script.alive == 0, "two incarnations at once"
        script.alive += 1
        try:
            await trio.sleep(script.slow_init)
            if script.fail_init:
                script.fail_init -= 1
                raise ScriptError(f"init of {script.name}")  # noqa: TRY301 - the test's own fault
        except BaseException:
            script.alive -= 1
            raise
        script.log.append(f"up {script.name}")

    async def handle(self, msg: Msg) -> None:
        self.script.taken.append(msg)
        match msg:
            case Crash():
                raise msg.error
            case Quit():
                self.stop()
            case Hold():
                await msg.until.wait()
            case Note():
                self.script.log.append(f"note {msg.text}")
            case Ask():
                msg.reply(f"{self.script.name}:{msg.text}")
            case Ignore():
                pass
            case CrashCall():
                raise msg.error

    async def terminate(self, reason: otp.ExitReason) -> None:
        script = self.script
        script.alive -= 1
        script.log.append(f"end {script.name} {type(reason).__name__}")
        await trio.sleep(script.slow_terminate)
        if script.fail_terminate is not None:
            raise script.fail_terminate
        script.log.append(f"down {script.name}")


@attrs.define(eq=False)
class Kit:
    """Makes addresses, scripts and specs that write to one log."""

    log: list[str] = attrs.field(factory=list)
    events: list[otp.Event] = attrs.field(factory=list)
    scripts: dict[str, Script] = attrs.field(factory=dict)
    addresses: dict[str, otp.Address[Msg]] = attrs.field(factory=dict)

    def actor(
        self, name: str, *, keep: bool = False, capacity: float = 100, **options: Any
    ) -> otp.ActorChild[Msg]:
        script = self.scripts[name] = Script(name, self.log)
        address = self.addresses[name] = otp.Address[Msg](name, keep=keep, capacity=capacity)
        return otp.ActorChild(address, lambda: Scripted(script), **options)

    def __getitem__(self, name: str) -> otp.Address[Msg]:
        return self.addresses[name]

    def observe(self, event: otp.Event) -> None:
        self.events.append(event)

    def exits(self, name: str) -> list[otp.ExitReason]:
        return [e.reason for e in self.events if isinstance(e, otp.ChildExited) and e.path.endswith(name)]

    def starts(self, name: str) -> int:
        return sum(isinstance(e, otp.ChildStarted) and e.path.endswith(name) for e in self.events)

    def take_log(self) -> list[str]:
        log, self.log[:] = list(self.log), []
        return log


def states(node: otp.Node) -> dict[str, str]:
    return {n.name: n.state for n in node.walk()}


def root(*children: otp.ChildSpec, **options: Any) -> otp.Supervisor:
    """A supervisor at the top of a tree."""
    return otp.Supervisor("root", children, **options)
