"""The actors of an engine, one per file. Start with `tree`."""
