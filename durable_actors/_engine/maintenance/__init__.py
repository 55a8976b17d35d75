"""Maintenance: leases, dead nodes, the watch over the event loop."""
