"""Running: which claim runs when, and the run of one step."""
