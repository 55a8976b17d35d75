"""The laws of the projection, on histories that a model of the row generates (PROTOCOL §c.7).

Every example is a whole history: folded twice, split anywhere, with one fact too many, continued after its end, and
compared with the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
from durable_actors.journal import (
    COLUMNS,
    KINDS,
    Fact,
    Level,
    Projection,
    Record,
    check_head,
    check_sequence,
    decode_record,
    differences,
    encode_record,
    expand,
    expand_all,
    fold,
    make_checkpoint,
    replay,
    row_of,
    usable,
)
from durable_actors.journal.facts import is_well_formed
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tests.journal.kit import at, reasons, without_anomalies
from tests.journal.row_model import RUN, RowModel

LAWS = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],  # both depend on the machine's load
)
LEVELS: list[Level] = ["auto", "outcomes", "claims", "full"]

numbers = st.lists(st.integers(0, 2**16), min_size=20, max_size=220)
models = st.builds(lambda level, chosen: RowModel(level, chosen).run(40), st.sampled_from(LEVELS), numbers)


def reloaded(records: Sequence[Record]) -> list[Record]:
    """As another store and another process would read them."""
    return [decode_record(encode_record(one), instance_id=RUN, rev=one.rev) for one in records]


@LAWS
@given(models)
def test_the_same_records_give_the_same_projection(model: RowModel):
    """Case 1, R2: twice, from records that went through JSON, and without the check of what `expand` made."""
    facts = list(expand_all(model.records))
    assert all(is_well_formed(fact) for fact in facts)
    assert fold(facts) == fold(facts) == fold(expand_all(reloaded(model.records))) == replay(model.records)
    half = len(model.records) // 2
    assert replay(model.records[half:], replay(model.records[:half])) == fold(facts)


@LAWS
@given(models)
def test_legal_histories_have_no_anomalies(model: RowModel):
    """Law 3, at every level."""
    assert reasons(fold(expand_all(check_sequence(model.records, RUN)))) == []
    level = model.row["journal"]
    check_head(RUN, last=model.records[-1].rev, row_rev=model.row["rev"], level=level)


@LAWS
@given(models)
def test_a_history_may_be_folded_in_two_parts(model: RowModel):
    """Case 2, R12: for every split, also when the first part comes from a checkpoint. The first part is not changed."""
    facts = list(expand_all(model.records))
    whole = fold(facts)
    base, shown = Projection(), ""
    for split, fact in enumerate([*facts, None]):
        assert fold(facts[split:], base) == whole
        assert msgspec.json.encode(base).decode() == shown or split == 0
        if fact is not None:
            base = fold([fact], base)
            shown = msgspec.json.encode(base).decode()
    for split in range(1, len(model.records)):
        done = fold(expand_all(model.records[:split]))
        stored = usable(make_checkpoint(done), head=model.row["rev"])
        assert stored == done
        assert fold(expand_all(model.records[split:], queue="default"), stored) == whole


@LAWS
@given(models)
def test_the_projection_tells_the_row(model: RowModel):
    """Law 6: all columns at "full", the control columns below, after every record."""
    check_rows(model)


def check_rows(model: RowModel) -> None:
    projection = None
    for record, row in zip(model.records, model.rows, strict=True):
        projection = fold(expand(record, queue="default"), projection)
        told = row_of(projection)
        assert differences(told, row) == {}, record.kind
        if model.row["journal"] == "full":
            assert not set(COLUMNS) - set(told)
            assert not {"priority", "tags", "partition_key", "inserted_at"} - set(told)
        elif not projection.run.approximate:
            assert {"status", "step", "visit", "attempt", "last_error"} <= set(told)


odd_facts = st.builds(
    lambda level, chosen, kind: [
        one for one in expand_all(RowModel(level, chosen).run(25).records) if kind in {"", one.kind}
    ],
    st.sampled_from(LEVELS),
    numbers,
    st.sampled_from(
        ["", "", "attempt_claimed", "attempt_completed", "claim_expired", "run_terminal", "wait_resolved"]
    ),
)


@LAWS
@given(models, odd_facts, st.randoms(use_true_random=False), st.booleans())
def test_one_illegal_fact_changes_only_the_anomalies(model: RowModel, others, random, other_claim):
    """Case 19, law 4: whatever the fact and wherever it stands."""
    facts = list(expand_all(model.records))
    place = random.randrange(len(facts))
    assume(others)
    odd: Fact = random.choice(others)
    data = {**odd.data, "claim_id": "nobody"} if other_claim and "claim_id" in odd.data else dict(odd.data)
    odd = Fact(odd.kind, RUN, odd.queue, facts[place].at, facts[place].rev, data)
    before = fold(facts[:place])
    assume(reasons(fold([odd], before)))
    legal, disturbed = fold(facts), fold([*facts[:place], odd, *facts[place:]])
    assert len(disturbed.anomalies) == 1
    assert without_anomalies(disturbed) == without_anomalies(legal)
    assert disturbed.rev == legal.rev


@LAWS
@given(models, odd_facts)
def test_nothing_changes_after_the_end(model: RowModel, others):
    """Law 5, R72. Two facts are not continuations: the command that revives, and a new base."""
    if model.row["finished_at"] is None:
        model.cancel()
    ended = fold(expand_all(model.records))
    assert ended.terminal is not None
    late = [
        one
        for one in others
        if one.kind not in {"run_revived", "run_snapshot", "run_indexed", "run_cataloged"}
    ]
    after = fold(late, ended)
    assert without_anomalies(after) == without_anomalies(ended)
    assert [one.reason for one in after.anomalies] == ["terminal_run"] * len(late)
    assert after.visible(at(10**7)) == after.expired(at(10**7)) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.just(at(1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@LAWS
@given(models, st.data())
def test_fold_is_total(model: RowModel, data: st.DataObject):
    """Facts with a field of the wrong type or without it never raise, and never count."""
    facts = list(expand_all(model.records))
    index = data.draw(st.integers(0, len(facts) - 1))
    fact = facts[index]
    broken = dict(fact.data)
    if broken:
        name = data.draw(st.sampled_from(sorted(broken)))
        broken[name] = data.draw(JSON)
        if data.draw(st.booleans()):
            del broken[name]
    facts[index] = Fact(fact.kind, fact.run, fact.queue, fact.at, fact.rev, broken)
    projection = fold(facts)
    if not is_well_formed(facts[index]):
        assert "malformed_entry" in {one.reason for one in projection.anomalies}


def test_long_histories_keep_the_laws_and_contain_every_move():
    """Hypothesis prefers short histories. Without every move, the laws would say nothing of some kinds."""
    seen: set[str] = set()
    for seed in range(200):
        random = Random(seed)
        model = RowModel(LEVELS[seed % 4], [random.randrange(2**16) for _ in range(400)]).run(60)
        seen |= {one.kind for one in model.records}
        assert reasons(fold(expand_all(model.records))) == []
        check_rows(model)
    assert seen == set(KINDS)
