"""The assertions of a bench. A failing one shows the instance, its errors, what ran, and why it is where it is."""

from __future__ import annotations

from typing import Any, Final, NoReturn, get_args

from durable_actors._client import Client
from durable_actors._option_checks import choice
from durable_actors._postgres.driver import encode
from durable_actors._postgres.driver.statement import Params, Row, Statement
from durable_actors._store.boundaries import Waiting
from durable_actors._store.observe import Filter, InstanceDetails, NodeView, observe_instance, read_nodes
from durable_actors._store.read import Instance
from durable_actors._store.why import why
from durable_actors.errors import NoTarget
from durable_actors.machine import MachineRef, StepRef, current_registry, decode_or_text
from durable_actors.testing.matching import ANY, describe, matches, same
from durable_actors.testing.report import Ran
from durable_actors.testing.statements import SENT

Target = int | str | bytes
"""An instance: its id or its unique key."""
MAX_COMPARED: Final = 1000
"""Instances of a machine that `assert_inserted` looks at, newest first."""
MAX_SHOWN: Final = 5


class Assertions(Client):
    """What a test asks about instances."""

    ran: list[Ran]
    """Every run of a step on this bench, in order."""

    async def assert_inserted(
        self, machine: MachineRef, *, state: object = ANY, queue: str | None = None, **fields: object
    ) -> Instance:
        """Assert that there is an instance of a machine or job, in whatever status; return the newest that matches.

        `state` (for a job, its arguments) is compared with the stored one, which steps may have changed since: of a
        dict, only the given keys. `fields` are attributes of `Instance`, such as `unique_key="order:42"`,
        `priority=-1` or `parent_id=number`.
        """
        __tracebackhide__ = True
        name = current_registry().find(machine).name
        found = await self.list_instances(Filter(machine=name), limit=MAX_COMPARED, full=True)
        expected = {"state": state, "queue": ANY if queue is None else queue, **fields}
        for instance in found:
            if all(matches(value, getattr(instance, field)) for field, value in expected.items()):
                return instance
        if not found:
            others = sorted({each.machine for each in await self.list_instances(limit=MAX_COMPARED)})
            there = f"there are instances of {', '.join(others)}" if others else "there is no instance at all"
            raise AssertionError(f"no instance of {name} was inserted; {there}")
        wanted = ", ".join(f"{key}={value!r}" for key, value in expected.items() if value is not ANY)
        lines = [
            f"  {each.id}: {each.status}, queue {each.queue!r}, state {each.state!r}"
            for each in found[:MAX_SHOWN]
        ]
        if len(found) > MAX_SHOWN:
            lines.append(f"  … and {len(found) - MAX_SHOWN} more")
        raise AssertionError("\n".join([f"no instance of {name} has {wanted}; there are", *lines]))

    async def assert_done(self, target: Target, result: object = ANY) -> Instance:
        """Assert that an instance is done, with this result; return it."""
        __tracebackhide__ = True
        instance, reason = await self.explained(target)
        if instance.status != "done":
            self._fail(f"instance {instance.id} is not done, but {instance.status}", instance, reason)
        if not same(result, instance.result):
            self._fail(
                f"the result of instance {instance.id} is {instance.result!r}, not {result!r}",
                instance,
                reason,
            )
        return instance

    async def assert_failed(self, target: Target, error: object = ANY) -> Instance:
        """Assert that an instance has failed; return it.

        `error` is a part of the text of its error, or the class of the exception.
        """
        __tracebackhide__ = True
        instance, reason = await self.explained(target)
        if instance.status != "failed":
            self._fail(f"instance {instance.id} has not failed: it is {instance.status}", instance, reason)
        if isinstance(error, type):
            if instance.error_type not in set(map(_stored_name, _with_subclasses(error))):
                self._fail(
                    f"instance {instance.id} failed because of {instance.error_type or 'no exception'}, not of "
                    f"{_stored_name(error)}",
                    instance,
                    reason,
                )
        elif error is not ANY and str(error) not in (instance.last_error or ""):
            self._fail(f"the error of instance {instance.id} does not contain {error!r}", instance, reason)
        return instance

    async def assert_waiting(
        self,
        target: Target,
        *,
        signal: str | None = None,
        step: str | StepRef[Any] | None = None,
        waiting: Waiting | None = None,
    ) -> Instance:
        """Assert that an instance waits: for a signal, a person, children, a time, or its turn; return it.

        `signal`: that it awaits this one. `step`: that it runs this step then (`Machine.step`, or its name). `waiting`:
        for what, as in `Filter`: "approval" or "pause" (a person), "signal", "children".
        """
        __tracebackhide__ = True
        instance, reason = await self.explained(target)
        details = await self._details(instance.id)
        if instance.status not in {"awaiting_signal", "awaiting_children", "runnable"}:
            self._fail(f"instance {instance.id} does not wait: it is {instance.status}", instance, reason)
        if signal is not None and (instance.status != "awaiting_signal" or signal not in details.awaits):
            self._fail(f"instance {instance.id} does not await a signal named {signal!r}", instance, reason)
        if waiting is not None and instance.waiting != choice("waiting", waiting, *get_args(Waiting)):
            self._fail(f"instance {instance.id} does not wait for {waiting!r}", instance, reason)
        asked = None if instance.boundary is None else instance.boundary.then
        then = asked or details.await_step or instance.step
        wanted = step.name if isinstance(step, StepRef) else step
        if wanted is not None and then != wanted:
            self._fail(f"instance {instance.id} runs step {then!r} next, not {wanted!r}", instance, reason)
        return instance

    async def assert_sent(self, target: Target, name: str, payload: object = ANY) -> None:
        """Assert that a signal was sent to an instance, by anybody and at any time, also if it is consumed by now.

        Of a dict, only the given keys of the payload are compared.
        """
        __tracebackhide__ = True
        instance, reason = await self.explained(target)
        rows = await self._query(SENT, [encode.number(instance.id)])
        sent = [((row[0] or b"").decode(), decode_or_text(row[1] or b"null")) for row in rows]
        if any(each == name and matches(payload, given) for each, given in sent):
            return
        shown = "" if payload is ANY else f" with {payload!r}"
        there = ", ".join(f"{each!r} with {given!r}" for each, given in sent) or "nothing"
        self._fail(
            f"no signal {name!r}{shown} was sent to instance {instance.id}; sent was {there}",
            instance,
            reason,
        )

    # -- the explanation

    async def explained(self, target: Target) -> tuple[Instance, str]:
        """An instance, and a sentence that says what it waits for or how it ended."""
        try:
            instance = await self.inspect(target)
        except NoTarget:
            if any(each.id == target and each.outcome == "Done" and each.committed for each in self.ran):
                raise NoTarget(
                    f"instance {target!r} was done, and its row is deleted: by keep=0 of its machine, or by sweep()"
                ) from None
            raise
        return instance, await self._why(instance)

    async def _why(self, instance: Instance) -> str:
        async with self._pool.acquire(self._lane) as conn:
            nodes = await read_nodes(conn, self._schema)
        return why(instance, await self._details(instance.id), [*nodes, _bench_as_node(instance)])

    async def _details(self, number: int) -> InstanceDetails:
        async with self._pool.acquire(self._lane) as conn:
            details = await observe_instance(conn, self._schema, number)
        assert details is not None
        return details

    def _fail(self, what: str, instance: Instance, reason: str) -> NoReturn:
        __tracebackhide__ = True
        raise AssertionError(f"{what}\n{describe(instance, reason, self.ran)}")

    async def _query(self, call: Statement, params: Params = ()) -> list[Row]:
        async with self._pool.acquire(self._lane) as conn:
            return (await conn.run(call, params)).rows


def _bench_as_node(instance: Instance) -> NodeView:
    """The bench serves every queue, and knows what is registered."""
    specs = current_registry().specs.values()
    return NodeView(
        incarnation="the bench",
        node="bench",
        started_at=None,
        seen_at=None,
        stopped_at=None,
        queues={instance.queue: 1},
        machines=tuple(f"{spec.name}/{spec.version}" for spec in specs),
        steps={f"{spec.name}/{spec.version}": tuple(spec.steps) for spec in specs},
        pid=None,
        version=None,
        alive=True,
        claims=0,
    )


def _stored_name(kind: type[Any]) -> str:
    """The name of an exception class, as `error_type` stores it."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    found = [kind]
    for each in found:
        found += each.__subclasses__()
    return found
