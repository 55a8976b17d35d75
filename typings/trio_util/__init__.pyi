# The parts of trio-util that we use. It ships no types.
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

class AsyncValue(Generic[T]):
    value: T
    def __init__(self, value: T) -> None: ...
    async def wait_value(self, value_or_predicate: T | Callable[[T], bool], *, held_for: float = 0) -> T: ...

class AsyncBool(AsyncValue[bool]):
    def __init__(self, value: bool = False) -> None: ...
