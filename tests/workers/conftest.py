"""Workers in other languages are tested where their programs are installed."""

from __future__ import annotations

from tests.workers.tools import missing

collect_ignore = list(missing())
