"""The engine's driver: prepared statements on libpq, on Trio."""
