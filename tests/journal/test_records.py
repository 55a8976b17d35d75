"""Records: their JSON, what damages them, and which moves each level records."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise

import msgspec
import pytest
from durable_actors.journal import (
    KINDS,
    LEVELS,
    InvalidJournalEntry,
    Level,
    Record,
    check_record,
    decode_record,
    encode_record,
    is_gapless,
    is_recorded,
    level_of,
    redact,
)
from tests.journal.golden import ERROR, RECORDS, ROW
from tests.journal.kit import RUN, at, record


def plain(name: str) -> dict:
    """The stored form, to damage it."""
    return json.loads(encode_record(RECORDS[name]))


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_survives_json(name):
    one = RECORDS[name]
    assert decode_record(encode_record(one), instance_id=RUN, rev=one.rev) == one
    assert decode_record(plain(name), instance_id=RUN, rev=one.rev) == one


def test_a_record_has_the_fields_of_the_contract():
    contract = [
        "rev",
        "at",
        "kind",
        "step",
        "to_step",
        "visit",
        "attempt",
        "node",
        "seconds",
        "error",
        "by",
        "data",
    ]
    assert set(contract) | {"instance_id", "claim_id"} == set(Record.__struct_fields__)
    assert set(msgspec.structs.asdict(ERROR)) == {"type", "text", "traceback"}


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("next", {"kind": "teleported"}, "unknown kind 'teleported'"),
        ("next", {"data": [1]}, "Expected `object`, got `array`"),
        ("next", {"data": None}, "Expected `object`, got `null`"),
        ("next", {"claim_id": None, "to_step": None}, "'next' needs claim_id, to_step"),
        ("retry", {"data": {}}, "missing required field `eligible_at`"),
        ("retry", {"data": {"eligible_at": "soon"}}, "Invalid RFC3339"),
        (
            "retry",
            {"data": {"eligible_at": "2026-01-01T00:00:00Z", "round": "one"}},
            "Expected `int`, got `str`",
        ),
        ("next", {"at": "2026-01-01T00:00:00"}, "at has no time zone"),
        ("next", {"at": None}, "Expected `datetime`"),
        ("retry", {"data": {"eligible_at": "2026-01-01T00:00:00"}}, "with a timezone component"),
        ("claimed", {"data": {"lease_until": "2026-01-01T00:00:00"}}, "with a timezone component"),
        (
            "started",
            {"data": {"row": {**ROW, "eligible_at": "2026-01-01T00:00:00"}}},
            "with a timezone component",
        ),
        ("next", {"rev": 3}, "says that it is revision 3 of instance 7"),
        ("next", {"instance_id": 8}, "says that it is revision 2 of instance 8"),
        ("started", {"data": {}}, "missing required field `row`"),
        ("started", {"data": {"row": {**ROW, "journal": "sometimes"}}}, "'sometimes' is no journal level"),
        ("started", {"data": {"row": {**ROW, "fsm": None}}}, "row of 'started': Expected `str`"),
        ("snapshot", {"data": {"row": ROW}}, "row of 'snapshot': Object missing required field"),
        ("asked", {"claim_id": None, "to_step": None}, "'asked' needs claim_id, to_step"),
        ("reaped", {"data": {**RECORDS["reaped"].data, "proof": "a feeling"}}, "Invalid enum value"),
    ],
)
def test_a_damaged_record_is_an_error_that_names_it(name, change, why):
    """Case 24, R20."""
    rev = RECORDS[name].rev
    with pytest.raises(InvalidJournalEntry) as caught:
        decode_record({**plain(name), **change}, instance_id=RUN, rev=rev)
    assert (caught.value.instance_id, caught.value.rev) == (RUN, rev)
    assert why in caught.value.reason
    assert str(caught.value).startswith(f"journal of instance 7, revision {rev}: ")


@pytest.mark.parametrize("stored", [b"", b"{", b"[]", b"\xff", b'{"rev": 2}', "null"])
def test_what_is_no_record_is_an_error(stored):
    with pytest.raises(InvalidJournalEntry):
        decode_record(stored, instance_id=RUN, rev=2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_needed_field_is_checked(kind):
    needed = KINDS[kind].fields
    good = next(one for one in RECORDS.values() if one.kind == kind)
    for name in needed:
        with pytest.raises(InvalidJournalEntry, match=name):
            check_record(msgspec.structs.replace(good, **{name: None}))


def test_a_newer_release_may_write_more():
    more = {**plain("next"), "data": {"later": 1}, "new_field": 2}
    assert decode_record(more, instance_id=RUN, rev=2).data == {"later": 1}


# Levels.


def recorded(level: Level, **more) -> set[str]:
    return {kind for kind in KINDS if is_recorded(kind, level, **more)}


def test_each_level_records_what_the_one_before_does():
    sets = [recorded(level) for level in LEVELS]
    assert sets[0] == set()
    assert sets[1] == sets[2], "auto, of a machine"
    assert all(one <= other for one, other in pairwise(sets))
    assert sets[3] == sets[4] == set(KINDS)
    assert set(KINDS) - recorded("outcomes") == {
        "claimed",
        "released",
        "reaped",
        "woken",
        "expired",
        "child_ended",
        "joined",
        "recounted",
        "held",
        "shelved",
        "throttled",
        "offered",
        "unblocked",
        "wakeup",
    }


def test_a_job_records_its_failed_attempts():
    assert recorded("auto", job=True) == {"retry", "failed", "crashed", "unfit"}
    assert recorded("outcomes", job=True) == recorded("outcomes")


@pytest.mark.parametrize("level", LEVELS)
def test_a_move_that_fails_the_instance_is_always_recorded(level):
    assert is_recorded("reaped", level, job=True, failed=True) == (level != "off")


def test_levels_have_names_and_numbers():
    assert [level_of(number) for number in range(5)] == list(LEVELS) == [level_of(name) for name in LEVELS]
    assert [is_gapless(level) for level in LEVELS] == [False, False, False, True, True]
    for bad in (-1, 5, "all", None):
        with pytest.raises(ValueError, match="is no journal level"):
            level_of(bad)


# Secrets.


def test_secrets_are_redacted_at_any_depth_before_they_are_stored():
    """C9."""
    metadata = {
        "ticket": 5,
        "API_KEY": "x",
        "Authorization": "x",
        "inner": {"db_password": "x", "list": [{"token": "x", "fine": 1}]},
    }
    expected = {
        "ticket": 5,
        "API_KEY": "[redacted]",
        "Authorization": "[redacted]",
        "inner": {"db_password": "[redacted]", "list": [{"token": "[redacted]", "fine": 1}]},
    }
    assert redact(metadata) == expected
    assert metadata["API_KEY"] == "x", "a copy"
    one = record(
        "revived", step="a", visit=1, attempt=0, data={"command": {"type": "retry", "metadata": metadata}}
    )
    stored = decode_record(encode_record(one), instance_id=RUN, rev=2)
    assert stored.data["command"] == {"type": "retry", "metadata": expected}


def test_times_keep_their_microseconds():
    one = record("wakeup", step="a", visit=1, attempt=0)
    exact = msgspec.structs.replace(one, at=at(1e-6))
    assert decode_record(encode_record(exact), instance_id=RUN, rev=2).at == exact.at
    assert isinstance(exact.at, datetime)
