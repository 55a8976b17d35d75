"""What every session of the engine's driver is set to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from durable_actors._postgres.statement import Params, Statement

# read_only: losing the connection here means "not connected", never "unknown".
_SET: Final = Statement("set_config", "select set_config($1, $2, false)", read_only=True)
_NOTICE_OUR_DEATH: Final = Statement(
    "notice_our_death",
    "select set_config('client_connection_check_interval', '2s', false)"
    " where version() !~* 'windows|mingw|visual'",
    read_only=True,
)
"""Else a backend goes on with a statement that nobody waits for (Ctrl-C, kill -9, a lost network) until it
wants to write. A server on Windows cannot, and refuses the setting."""

_SNAPSHOTS: Final = {"default_transaction_isolation": "read committed"}
"""Every statement needs a snapshot of its own: a recheck that runs on its transaction's first one sees no signal that
came since, whatever a role's or a database's default is."""

_TEXT: Final = {"bytea_output": "hex", "datestyle": "ISO", "intervalstyle": "postgres", "timezone": "UTC"}
"""Columns come as text: what shapes it must not depend on a role's or a database's defaults."""


def session_calls(settings: Mapping[str, str]) -> list[tuple[Statement, Params]]:
    """The statements that set a new session up, in one round trip; `settings` win over ours."""
    return [
        (_NOTICE_OUR_DEATH, ()),
        *(
            (_SET, [name.encode(), value.encode()])
            for name, value in (_SNAPSHOTS | _TEXT | dict(settings)).items()
        ),
    ]
