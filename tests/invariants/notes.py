"""What those who give commands write to an effect log: each attempt before it is sent, and what they were told.

An attempt without an answer may have been carried out, or not.
"""

from __future__ import annotations

from typing import Final

ASKED: Final = "asked"
"""A command is about to be sent: `id` (of a queue: `target`), `command`, `key` (its idempotency key)."""
ANSWERED: Final = "answered"
"""The same command was answered: with `answer`, or `refused` by the name of an error: nothing was done."""
