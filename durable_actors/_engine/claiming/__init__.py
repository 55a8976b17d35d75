"""Claiming: when to pick, how much, and where the pick begins."""
