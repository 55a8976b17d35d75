"""Partition keys: which step may run under which key, and the session that holds the locks."""
