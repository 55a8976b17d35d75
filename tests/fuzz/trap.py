"""Imported by nobody: a test looks whether it was."""

from __future__ import annotations

import durable_actors as da


class Trap(da.Machine):
    @da.step
    async def start(self, ctx):
        return da.Done("trapped")

    def run(self):
        raise AssertionError("a row has run this")
