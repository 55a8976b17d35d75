"""The example runs, and does what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import trio
from tests.warm import warm
from trio.testing import MockClock

PATH = Path(__file__).parent.parent.parent / "examples" / "otp_chat.py"


def test_the_chat_example(capsys, caplog):
    spec = importlib.util.spec_from_file_location("otp_chat", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["otp_chat"] = module
    try:
        spec.loader.exec_module(module)
        trio.run(module.main, clock=MockClock(autojump_threshold=0))
    finally:
        del sys.modules["otp_chat"]
    lines = capsys.readouterr().out.splitlines()
    said = [f"{n}: {t}" for n in ("ada", "eve", "kay") for t in ("hello", "how are you", "bye")]
    said.remove("eve: how are you")  # it said the word that the room cannot stand
    assert [line for line in lines if line in said] == sorted(said)
    assert {f"{name} left (normal)" for name in ("ada", "eve", "kay")} <= set(lines)
    heard = [line for line in lines if line.startswith("the audience heard")]
    assert "restart of room" in heard[0]
    assert "the block ended" in heard[1]
    assert sum(int(line.split()[3]) for line in heard) == len(said)
    assert any("room [actor]" in line and "restarts 1" in line for line in lines)
    assert "BadWordError" in caplog.text


def test_it_runs_as_a_script(tmp_path: Path):
    code, said, errors = warm().run(PATH, cwd=tmp_path, env=os.environ, timeout=30)
    assert "chat [supervisor] running" in said
    assert (code, errors) == (0, "")


def test_the_documentation_runs(tmp_path: Path):
    text = (PATH.parent.parent / "docs" / "explanation" / "supervision.md").read_text("utf-8")
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "program.py").write_text(program, "utf-8")
    code, said, errors = warm().run(tmp_path / "program.py", cwd=tmp_path, env=os.environ, timeout=30)
    assert said.startswith("1\napp [supervisor] running")
    assert (code, errors) == (0, "")
