"""Schedules in pure form: which slots a rule has, what is due, what a node may declare. No I/O, and no clock."""
