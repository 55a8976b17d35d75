"""Longer fuzzing: `python -m tests.fuzz [FACTOR] [PYTEST ARGUMENTS ...]`.

FACTOR (20) times as many examples as in `make test`, drawn at random; a failure prints the example, and the seed with
which Hypothesis repeats it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

factor, arguments = "20", sys.argv[1:]
if arguments and arguments[0].isdigit():
    factor, *arguments = arguments
os.environ["DURABLE_FUZZ"] = factor
sys.exit(
    pytest.main([str(Path(__file__).parent), "--timeout=3600", "--hypothesis-show-statistics", *arguments])
)
