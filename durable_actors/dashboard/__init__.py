"""The dashboard: an ASGI app on Trio, its own small server, and the views.

    async with dashboard.open_app(dsn) as app:  # mountable in any ASGI server that runs on Trio
        await serve(app, host="127.0.0.1", port=8765)

`durable-actors dashboard` does this in a process of its own, `Config(dashboard=da.Dashboard(...))` inside an engine.
Needs the extra `dashboard`.
"""

from __future__ import annotations

from durable_actors.dashboard_options import Access, AccessRequest, Dashboard

__all__ = ["Access", "AccessRequest", "Dashboard"]
