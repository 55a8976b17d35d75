"""`last_error`: readable, storable, and never itself an error."""

import durable_actors.machine as da
from durable_actors.errors import StepTimeout
from durable_actors.machine import error_type, traceback_text
from hypothesis import given, strategies as st


class Rude(Exception):
    def __str__(self):
        raise RuntimeError


class RudeValue:
    def __repr__(self):
        raise RuntimeError


def test_texts():
    assert da.reason_text("as it is") == "as it is"
    assert da.reason_text(ValueError("no")) == "ValueError: no"
    assert da.reason_text(ValueError()) == "ValueError"
    assert da.reason_text(StepTimeout("late")) == "durable_actors.errors.StepTimeout: late"
    assert da.reason_text({"code": 5}) == "{'code': 5}"
    assert da.reason_text("") == "(no reason given)"
    assert da.reason_text(None) == "None"


def test_notes_and_groups_are_told():
    error = ValueError("no")
    error.add_note("while shipping")
    assert da.reason_text(error) == "ValueError: no\nwhile shipping"
    group = ExceptionGroup("two", [error, ExceptionGroup("more", [KeyError("k")])])
    assert da.reason_text(group).splitlines() == [
        "ExceptionGroup: two (2 sub-exceptions)",
        "  1. ValueError: no",
        "     while shipping",
        "  2. ExceptionGroup: more (1 sub-exception)",
        "       1. KeyError: 'k'",
    ]


def test_rude_objects_do_not_hurt():
    assert "Rude" in da.reason_text(Rude())
    assert "RudeValue" in da.reason_text(RudeValue())


def test_long_texts_are_cut():
    assert len(da.reason_text("x" * 20_000)) == 10_000
    assert da.reason_text("x" * 20_000).endswith("…")


@given(st.text(st.characters(codec=None)) | st.builds(ValueError, st.text(st.characters(codec=None))))
def test_every_reason_is_a_storable_text(reason):
    text = da.reason_text(reason)
    assert text
    assert "\0" not in text
    text.encode()


def _fail(text: str) -> None:
    raise ValueError(text)


def test_a_traceback_is_storable_and_cut_in_the_middle():
    try:
        _fail("first " + "y" * 40_000)
    except ValueError as error:
        text = traceback_text(error)
    assert text is not None
    assert len(text.encode()) <= 16_000
    assert text.startswith("Traceback (most recent call last):\n")
    assert "bytes left out" in text
    assert text.endswith("yyy\n")
    try:
        _fail("x" * 10 + "\0\udcff")
    except ValueError as error:
        text = traceback_text(error)
    assert text is not None
    assert text.endswith("ValueError: xxxxxxxxxx\\0\\udcff\n")


def test_a_traceback_never_raises():
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    text = traceback_text(Hostile())
    assert text is None or "Hostile" in text
    assert error_type(Hostile()).endswith("Hostile")
    assert error_type(KeyError()) == "KeyError"


def test_groups_in_groups_are_cut():
    """Formatted at every level again they took ten seconds, in which nothing else ran."""
    error: BaseException = ValueError("x")
    for _ in range(5_000):
        error = ExceptionGroup("g", [error])
    assert da.reason_text(error).count("ExceptionGroup: g") == 11
    assert da.reason_text(error).endswith("…")
    assert traceback_text(error) is None
    assert da.shown_error(error) is None
    shallow = ExceptionGroup("g", [ValueError("x")])
    shallow.add_note("a note")
    assert da.reason_text(shallow) == "ExceptionGroup: g (1 sub-exception)\na note\n  1. ValueError: x"
    assert da.shown_error(shallow) is shallow


def test_a_text_never_raises():
    class Notes(Exception):
        @property
        def __notes__(self) -> list[str]:
            raise RuntimeError

    assert da.reason_text(Notes("x")).endswith("Notes: (its text cannot be shown)")
    assert traceback_text(Notes("x")) is None
