"""Run a workflow again from one of its tasks: which tasks run, and what the new instance begins with. Pure.

The new instance begins in the step "rerun" with `{"params": …, "carried": {task: result}}`: it needs nothing of the old
one any more, whose rows may be deleted at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, cast

from durable_actors._option_checks import shown
from durable_actors.errors import StateError

START: Final = "start"
RERUN: Final = "rerun"
_PARAMS: Final = "params"
_CARRIED: Final = "carried"


def run_again(after: Mapping[str, Collection[str]], named: str, done: Collection[str]) -> set[str]:
    """Return the tasks that run when the workflow is run again from the task `named`.

    These are that task, every task that has no result, and all that come after one of these. `after` has what each task
    comes after, `done` the tasks with a result.
    """
    followers: dict[str, list[str]] = {}
    for name, before in after.items():
        for each in before:
            followers.setdefault(each, []).append(name)
    todo = [named, *(name for name in after if name not in done)]
    found = set(todo)
    while todo:
        for name in followers.get(todo.pop(), ()):
            if name not in found:
                found.add(name)
                todo.append(name)
    return found


def first_state(params: object, carried: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state in which the step "rerun" begins."""
    return {_PARAMS: params, _CARRIED: dict(carried)}


def carried_in(state: Any) -> tuple[Any, dict[str, Any]]:
    """Return the parameters and the results of a state of the step "rerun". Raises `StateError` for another one."""
    if not _is_first_state(state):
        raise StateError(
            f"the step {RERUN!r} begins with parameters and results, as rerun writes them: {shown(state)}"
        )
    return state[_PARAMS], state[_CARRIED]


def split_state(step: str, state: Any) -> tuple[Any, dict[str, Any]]:
    """Return the parameters of a workflow, and the results that it carries but has not used yet, from its row."""
    return carried_in(state) if step == RERUN and _is_first_state(state) else (state, {})


def _is_first_state(state: Any) -> bool:
    if not isinstance(state, dict):
        return False
    given = cast("dict[str, Any]", state)
    return given.keys() == {_PARAMS, _CARRIED} and isinstance(given[_CARRIED], dict)
