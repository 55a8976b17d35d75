"""`TaskRef`: the name and owner of a task, and the type of its result, as `ctx.result_of` uses them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from durable_actors.machine._codec import decode_json

T_co = TypeVar("T_co", covariant=True)


class TaskRef(Generic[T_co]):
    """A reference to a task of a workflow: `self.fetch` or `Report.fetch`. `T_co` is the type of its result."""

    __slots__ = ("name", "owner", "result_type")

    name: str
    """The task's name, which is the key of its child."""
    owner: type[Any] | None
    """The workflow class that it belongs to; None until the class is created."""
    result_type: Any
    """The type of its result, from the annotation of the function; Any without one."""

    def __init__(self, name: str, owner: type[Any] | None, result_type: Any) -> None:
        self.name = name
        self.owner = owner
        self.result_type = result_type

    def read_result(self, stored: object) -> T_co:
        """Return a result, as JSON values, in the type that the task is annotated with. Raises `StateError`."""
        if self.result_type is Any:
            return stored  # type: ignore[return-value]  # Any
        result: T_co = decode_json(
            msgspec.json.encode(stored), what=f"the result of task {self.name}", type=self.result_type
        )
        return result
