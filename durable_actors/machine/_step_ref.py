"""`StepRef`: the name and owner of a step, and (for type checkers) its state type, as outcomes use them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

S = TypeVar("S")


class StepRef(Generic[S]):
    """A reference to a step of a machine: `self.ship` or `Checkout.ship`.

    `S` is the state type that the step reads. It is invariant on purpose: a type checker would widen a covariant
    `S` to `Order | int` and accept `Next(self.ship, 3)`.
    """

    __slots__ = ("name", "owner")

    name: str
    """The step's name as stored in the row."""
    owner: type[Any] | None
    """The class whose body defines the step; None until the class is created."""

    def __init__(self, name: str, owner: type[Any] | None) -> None:
        self.name = name
        self.owner = owner
