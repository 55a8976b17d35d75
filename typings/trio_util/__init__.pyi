# The parts of trio-util that we use. It ships no types.
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

class AsyncValue(Generic[_T]):
    value: _T
    def __init__(self, value: _T) -> None: ...
    async def wait_value(
        self, value_or_predicate: _T | Callable[[_T], bool], *, held_for: float = 0
    ) -> _T: ...

class AsyncBool(AsyncValue[bool]):
    def __init__(self, value: bool = False) -> None: ...
