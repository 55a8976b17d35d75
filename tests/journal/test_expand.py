"""From records to facts: a golden table (`expanded.txt`) for every kind, and the order in which facts are committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from durable_actors.journal import FACTS, KINDS, check_record, dispatch_order, expand, expand_all, fold
from durable_actors.journal.expand import EXPANSIONS
from durable_actors.journal.facts import is_well_formed
from tests.journal.golden import RECORDS
from tests.journal.kit import line, reasons
from tests.journal.row_model import RowModel

GOLDEN = Path(__file__).with_name("expanded.txt")


def golden() -> dict[str, list[str]]:
    """Name of a record → its facts."""
    found: dict[str, list[str]] = {}
    for text in GOLDEN.read_text("utf-8").splitlines():
        if text.startswith("["):
            found[text[1:-1]] = []
        elif text:
            found[list(found)[-1]].append(text)
    return found


EXPECTED = golden()


def test_the_table_has_every_kind():
    """Case 18."""
    assert set(EXPANSIONS) == set(KINDS) == {record.kind for record in RECORDS.values()}
    assert list(EXPECTED) == list(RECORDS)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_becomes_these_facts(name):
    """Case 18."""
    assert [line(fact) for fact in expand(check_record(RECORDS[name]))] == EXPECTED[name]


@pytest.mark.parametrize("name", RECORDS)
def test_every_fact_is_well_formed_and_every_kind_of_fact_occurs(name):
    assert all(is_well_formed(fact) for fact in expand(RECORDS[name]))
    assert {fact.kind for record in RECORDS.values() for fact in expand(record)} == set(FACTS)


def test_a_result_is_applied_after_its_completion_and_before_what_follows_from_it():
    """Case 18: R53 holds in every record, because expansion puts the completion first."""
    for record in RECORDS.values():
        kinds = [fact.kind for fact in expand(record)]
        if "runnable_applied" in kinds:
            applied = kinds.index("runnable_applied")
            assert kinds[applied - 1] in {"attempt_completed", "attempt_failed"}
            assert "attempt_scheduled" not in kinds[:applied]
        if "attempt_scheduled" in kinds and "runnables_planned" in kinds:
            assert kinds.index("runnables_planned") < kinds.index("attempt_scheduled")


def test_the_queue_of_a_run_is_known_after_its_first_record():
    facts = list(expand_all([RECORDS["started"], RECORDS["claimed"]]))
    assert facts[0].queue == facts[-1].queue == "checkout"
    assert expand(RECORDS["claimed"], queue="mail")[0].thread.name == "dispatch:mail"
    assert expand(RECORDS["claimed"])[0].queue == ""


def test_the_thread_of_a_queue_is_ordered_by_time_then_run_then_revision():
    model = RowModel("full", [0, 5] * 40).run(12)
    facts = [fact for fact in expand_all(model.records) if fact.thread.kind == "dispatch"]
    assert len(facts) > 5
    assert [fact.rev for fact in sorted(facts, key=dispatch_order)] == sorted(fact.rev for fact in facts)


def test_a_folded_record_needs_no_record_of_its_claim():
    """At level "outcomes" a claim is told by the record that ends it."""
    model = RowModel("outcomes")
    model.claim()
    model.next()
    assert [record.kind for record in model.records] == ["started", "next"]
    projection = fold(expand_all(model.records))
    assert (reasons(projection), projection.status) == ([], "runnable")
    first = projection.attempts["7/1/begin#0.0"]
    assert (first.status, first.claim and first.claim.id) == ("completed", "claim-1")
