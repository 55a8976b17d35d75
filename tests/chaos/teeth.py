"""Do the chaos runs have teeth? Break the product on purpose, in a copy, and see them fail.

    python -m tests.chaos.teeth [--only fence --only reaper] [--seeds 3]

Each breakage is one edit. A run that still says ok has not seen it: either the invariants are blind there, or the
nemesis does not reach it, or another part of the product makes up for it (`UNSEEN` says what is known).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).parent.parent.parent
ENGINE: Final = "durable_actors/_engine"
STORE: Final = "durable_actors/_store"
FENCE: Final = "where g.id = o.id and g.claim_id = o.claim and g.visit = o.visit and g.locked_by is not null"


OVERRULE: Final = (
    "g.request is null or o.status in ('done', 'cancelled') or not durable.asked_to_cancel(g.request)"
)
TAKEN: Final = "        async with node.pool.acquire(node.lane(role), within=within) as conn:\n"
PROCEED: Final = """\
        lost = [e for e in batch if e.transition.keep_claim and e.transition.claim.id % 5 == 0]
        batch = [e for e in batch if e not in lost]
        fake = {t.claim.id: Committed(t.claim.visit + 1, "executing", t.state or t.claim.state)
                for t in (e.transition for e in lost)}
        if not batch:
            return fake
"""


@attrs.frozen
class Breakage:
    """One edit, and the nemeses that should find it."""

    edits: tuple[tuple[str, str, str], ...]
    """File, what is there, what is put in its place."""
    nemeses: tuple[str, ...]


def _edit(path: str, old: str, new: str, *nemeses: str) -> Breakage:
    return Breakage(((path, old, new),), nemeses)


BREAKAGES: Final = {
    # slots are given to whoever asks
    "limit-slots": _edit(
        f"{STORE}/migrations/0029_limits.sql",
        "when slots[k] is not null and free[k] - took[k] <= 0 then 1e8",
        "when false then 1e8",
        "none",
        "kill",
    ),
    # an instance that waits for a signal has given up the slot that it keeps
    "limit-kept": _edit(
        f"{STORE}/migrations/0029_limits.sql",
        "select s.instance_id from durable.kept_slots s",
        "select s.instance_id from (select k.* from durable.kept_slots k where false) s",
        "none",
        "kill",
    ),
    # the end of a slot's holder tells nobody, and nobody looks again by himself
    "limit-wake": Breakage(
        (
            (
                f"{STORE}/migrations/0029_limits.sql",
                "when wait >= 1e9 then 60 when wait >= 1e8 then 2",
                "when wait >= 1e8 then 3600",
            ),
            (f"{STORE}/migrations/0029_limits.sql", "perform durable.expect_slot(slot);", ""),
        ),
        ("none", "kill"),
    ),
    # a dependent is let go when the first of those that it comes after has ended
    "graph-order": _edit(
        f"{STORE}/sql/tell_dependents.sql",
        "greatest(e.waits - d.n, 0) else 0 end",
        "0 else 0 end",
        "none",
        "kill",
    ),
    # what ends tells nobody: neither those that come after it, nor the trigger
    "graph-tell": _edit(f"{STORE}/commit.py", "return {**tells,", "return {", "none", "kill"),
    # what comes after a failure runs
    "graph-doom": _edit(
        f"{STORE}/sql/tell_dependents.sql",
        "min(x.id) filter (where x.status <> 'done')",
        "null::bigint",
        "none",
        "kill",
    ),
    # what a commit hands over is claimed, and on offer as well
    "graph-hand-over": _edit(
        f"{STORE}/sql/tell_dependents.sql",
        "status = case when r.taken then 'executing' else g.status end",
        "status = g.status",
        "none",
        "kill",
    ),
    # whoever comes late writes all the same
    "fence": Breakage(
        (
            (f"{STORE}/sql/commit_outcomes.sql", FENCE, "where g.id = o.id"),
            (f"{STORE}/sql/commit_parks.sql", FENCE, "where g.id = o.id"),
        ),
        ("stop", "stop-points"),
    ),
    # a claim is not asked for, only the visit
    "fence-claim": Breakage(
        (
            (f"{STORE}/sql/commit_outcomes.sql", " and g.claim_id = o.claim", ""),
            (f"{STORE}/sql/commit_parks.sql", " and g.claim_id = o.claim", ""),
        ),
        ("stop", "stop-points"),
    ),
    # steps are not cancelled when their lease ends, nor when their claim is lost
    "trust": Breakage(
        (
            (f"{ENGINE}/claims.py", "active.task.deadline = trusted_until", "pass"),
            (
                f"{ENGINE}/claims.py",
                "active.task.cancel(why)\n\n    def interrupt",
                "pass\n\n    def interrupt",
            ),
            (
                f"{ENGINE}/running/dispatcher.py",
                "deadline=active.claim.trusted_until",
                'deadline=float("inf")',
            ),
            (f"{ENGINE}/running/dispatcher.py", "task.deadline = active.claim.trusted_until", "pass"),
        ),
        ("stop", "block", "mixed"),
    ),
    # a signal that comes while the step runs does not wake it
    "recheck": _edit(f"{STORE}/commit.py", 'riders["recheck_awaits"] =', "_ =", "none"),
    # signals that a step has counted are counted again
    "consume": _edit(f"{STORE}/commit.py", 'riders["consume_signals"] =', "_ =", "none"),
    # a stale outcome consumes what another run was handed
    "consume-stale": _edit(
        f"{STORE}/sql/consume_signals.sql",
        "where g.xmin = pg_current_xact_id()::xid",
        "where true",
        "stop",
        "stop-points",
    ),
    "reaper": _edit(f"{ENGINE}/maintenance/reaper.py", "if not await self._reap(dead):", "if True:", "kill"),
    # whoever takes back takes all, also claims whose lease is not over
    "early-reap": _edit(
        f"{STORE}/sql/reap_claims.sql",
        "y.lease_expires_at <= pg_catalog.now()",
        "y.lease_expires_at <= pg_catalog.now() + interval '10 seconds'",
        "kill",
    ),
    # a node is dead as soon as it is seen, whatever its lock says
    "dead-nodes": _edit(
        f"{ENGINE}/maintenance/failure_detector.py",
        "if asked - suspect.since >= dead_after and each.server_up > dead_after:",
        "if True:",
        "restart",
    ),
    # a node that is stopped for a moment is dead
    "alive-nodes": _edit(
        f"{ENGINE}/maintenance/failure_detector.py",
        "if each.alive or each.owner == me or",
        "if each.owner == me or",
        "stop",
    ),
    "join": _edit(
        f"{STORE}/commit.py", ', "join_parents": (statement("join_parents", schema), [ids])}', "}", "none"
    ),
    # a barrier opens one child too early
    "join-early": _edit(
        f"{STORE}/sql/join_parents.sql",
        "p.children_pending <= e.n or",
        "p.children_pending <= e.n + 1 or",
        "none",
    ),
    # a key is granted without its session lock
    "key-locks": _edit(
        f"{ENGINE}/keys/locks.py",
        "granted |= await self._try(wanting)",
        "granted |= {each.claim_id for each in wanting}",
        "stop",
        "mixed",
    ),
    # a thread that outlives its claim is forgotten, its key given to others
    "threads": _edit(
        f"{ENGINE}/threads.py",
        "await thread.wait_ended()",
        "pass",
        "terminate",
        "stop",
        "term",
        "mixed",
    ),
    "promote": Breakage(
        ((f"{STORE}/commit.py", "riders |= _of_keys(", "_ = _of_keys("),),
        ("none", "kill"),
    ),
    # a deadline passes and nobody wakes
    "deadlines": _edit(
        f"{ENGINE}/claiming/planner.py",
        "if self._deadline <= self._began and not self._expired:",
        "if False:",
        "none",
    ),
    # execution proceeds, and nothing is committed
    "unwritten": Breakage(
        (
            (
                f"{ENGINE}/committing/flusher.py",
                f"{TAKEN}            try:\n                flushed",
                f"{PROCEED}{TAKEN}            try:\n                flushed",
            ),
            (
                f"{ENGINE}/committing/flusher.py",
                'return cast("dict[int, Verdict]", flushed.committed)',
                "return {**flushed.committed, **fake}",
            ),
        ),
        ("none",),
    ),
    # what a step sends is sent again by its next run
    "identity": _edit(
        f"{STORE}/children.py",
        "json.dumps(parts if initial is None else [*parts, initial])",
        "repr(uuid.uuid4())",
        "kill",
        "mixed",
    ),
    # what came of a commit whose answer was lost is guessed
    "unknown": _edit(
        f"{STORE}/commit.py",
        "if now is None or now.claim_id != transition.claim.claim_id:\n        return None",
        "if now is None:\n        return None\n    return Committed(now.visit, transition.status, now.state)",
        "lost-messages",
    ),
    # what a step commits, whatever was asked of it
    "overrule": Breakage(
        (
            (f"{STORE}/sql/commit_outcomes.sql", OVERRULE, "true"),
            (f"{STORE}/sql/commit_parks.sql", OVERRULE, "true"),
        ),
        ("commands",),
    ),
    # who was asked to end, and whose worker is dead, runs again
    "reap-asked": _edit(
        f"{STORE}/sql/reap_claims.sql",
        "durable.asked_to_cancel(y.request) as asked",
        "false as asked",
        "commands-mixed",
    ),
    # who was asked to end, and is given back, runs again
    "release-asked": _edit(
        f"{STORE}/sql/release_claims.sql",
        "durable.asked_to_cancel(y.request) and x.undo is null as ends",
        "false as ends",
        "commands",
    ),
    # a child that was cancelled is not counted at the barrier
    "count-cancelled": _edit(
        f"{STORE}/sql/cancel_instance.sql",
        "durable.count_ended(g.parent_id, g.barrier) as opened",
        "null::text as opened",
        "commands",
    ),
    # a command is answered, and nothing is done
    "unfounded": _edit(
        f"{STORE}/sql/cancel_instance.sql",
        "set request = t.request, updated_at",
        "set request = g.request, updated_at",
        "commands",
    ),
    # a command with a key is carried out as often as it is sent
    "receipts": Breakage(
        (
            (
                f"{STORE}/migrations/0012_commands.sql",
                "create unique index receipts_once",
                "create index receipts_once",
            ),
            (f"{STORE}/sql/find_receipt.sql", "where r.command", "where false and r.command"),
        ),
        ("commands", "commands-network"),
    ),
    # nodes do not learn what is asked of them
    "control": _edit(f"{ENGINE}/maintenance/control.py", "await self._look()", "pass", "commands"),
    # who picks does not look whether the queue is paused
    "paused-queue": Breakage(
        (
            (
                f"{STORE}/sql/pick_instances.sql",
                "from durable.pauses p where p.queue = $1::text and",
                "from durable.pauses p where false and p.queue = $1::text and",
            ),
            (
                f"{STORE}/sql/pick_instances_by_id.sql",
                "from durable.pauses p where p.queue = $1::text and",
                "from durable.pauses p where false and p.queue = $1::text and",
            ),
        ),
        ("commands",),
    ),
    # a step that was asked to pause commits as if nobody had asked
    "paused-commit": Breakage(
        (
            (f"{STORE}/sql/commit_outcomes.sql", "durable.asked_to_pause(g.request)", "false"),
            (f"{STORE}/sql/commit_outcomes.sql", "durable.hold_of(g.request)", "0"),
        ),
        ("commands",),
    ),
    # a decision is taken whether the boundary is open or not
    "decided-again": Breakage(
        (
            (f"{STORE}/sql/resolve_boundary.sql", "and y.status = 'awaiting_signal'", ""),
            (
                f"{STORE}/sql/resolve_boundary.sql",
                "durable.waits_for(y.status, y.manual) = case",
                "y.status <> 'executing' and y.finished_at is null and y.manual ->> 'kind' = case",
            ),
        ),
        ("commands",),
    ),
    # who is cancelled with its children leaves them alone
    "cascade": _edit(
        f"{STORE}/sql/cancel_instance.sql",
        "case when durable.asked_for_children(g.request) then durable.cascade",
        "case when false then durable.cascade",
        "commands",
    ),
    # children that somebody had locked are forgotten
    "cascade-missed": Breakage(
        (
            (
                f"{STORE}/sql/cancel_children.sql",
                "c.id = s.id and s.children < $2::int and s.missing is null",
                "c.id = s.id and s.children < $2::int",
            ),
            (
                f"{STORE}/sql/cancel_children.sql",
                "(s.children >= $2::int or s.missing is not null)",
                "s.children >= $2::int",
            ),
        ),
        ("commands", "commands-strangers"),
    ),
    # a barrier that opens does nothing to the rest
    "rest": _edit(
        f"{STORE}/sql/join_parents.sql",
        "case when p.cancel_rest and p.status = 'runnable' then durable.cascade(p.id, p.visit, null) end as cascades",
        "null::boolean as cascades",
        "commands",
    ),
    # who was asked to end, and should compensate, does not
    "undo": _edit(
        f"{STORE}/sql/release_claims.sql",
        "then durable.compensation(y.request, y.partition_key) end) x(undo)",
        "then null::text end) x(undo)",
        "commands",
    ),
    # who has compensated is done
    "undone": _edit(
        f"{ENGINE}/committing/transition.py",
        "    if claim.cancellation is not None:  # it compensated",
        "    if False:",
        "commands",
    ),
    # a batch that runs again is carried out again
    "bulk-again": _edit(
        f"{STORE}/bulk_receipts.py",
        'return f"bulk:{number}"',
        "import secrets; return f'bulk:{number}:{secrets.token_hex(4)}'",
        "commands",
    ),
    # a rerun with a key that was used starts another one
    "rerun-again": Breakage(
        (
            (
                f"{STORE}/sql/rerun_instance.sql",
                "$4::text, $5::jsonb, to_jsonb(s.id)",
                "null, $5::jsonb, to_jsonb(s.id)",
            ),
            (f"{STORE}/sql/find_receipt.sql", "where r.command", "where false and r.command"),
        ),
        ("commands", "commands-network"),
    ),
    # retention deletes records that no snapshot tells
    "truncated": Breakage(
        (
            (f"{STORE}/migrations/0019_retention.sql", "told::text::bigint end", "rev + 1 end"),
            (
                f"{STORE}/migrations/0019_retention.sql",
                "or exists (select 1 from durable.journal j where j.instance_id = u.id and j.rev = u.cut",
                "or exists (select 1 from durable.journal j where j.instance_id = u.id",
            ),
        ),
        ("commands-retention",),
    ),
    # retention deletes what has just ended
    "retention-age": _edit(
        f"{STORE}/sql/delete_ended.sql",
        "a.finished_at <= durable.now() - make_interval(secs => least(a.age, 1e10))",
        "true",
        "commands-retention",
    ),
    # retention deletes what its parent has not read
    "retention": _edit(
        f"{STORE}/sql/delete_ended.sql",
        "p.status <> 'done' and (l.barrier is null or l.barrier >= p.visit)",
        "false",
        "commands-retention",
    ),
    # a move that its journal does not tell
    "unrecorded": _edit(f"{STORE}/sql/release_claims.sql", "g.journal >= 3", "g.journal > 4", "term"),
    # a state that its journal tells wrongly
    "misrecorded": _edit(
        f"{STORE}/sql/journal_outcomes.sql",
        "jsonb_build_object('state', g.state)",
        "jsonb_build_object('state', 1)",
        "none",
    ),
    # a rebuild that forgets a column
    "rebuild": _edit(f"{STORE}/sql/rebuild_instance.sql", "visit = t.visit, ", "", "none"),
}

UNSEEN: Final = {
    "promote": "the reaper's sweep offers rows that are held behind nothing (tests/store tests the promotion)",
    "dead-nodes": "its sessions are cut, so nobody can say whether a node was dead (tests/engine/test_dead_nodes.py)",
    "alive-nodes": "a worker that stands still is no witness of its being alive (tests/engine/test_dead_nodes.py)",
    "unknown": "wrong only if the claim was taken between two attempts (tests/engine/test_flusher.py)",
    "threads": "the key must be taken while a thread ends; seen at times (tests/engine/test_threads.py)",
}
"""Breakages that runs mostly do not see, why, and what does."""


def broken_texts(breakage: Breakage) -> dict[str, str]:
    """The files that it changes, each with its new text."""
    found: dict[str, str] = {}
    for name, old, new in breakage.edits:
        text = found[name] if name in found else (ROOT / name).read_text()
        if old not in text:
            raise SystemExit(f"{name} does not contain {old!r} any more: adapt the breakage")
        found[name] = text.replace(old, new)
    return found


def copy_broken(breakage: Breakage, where: Path) -> None:
    """A copy of package and tests, with the edits."""
    for folder in ("durable_actors", "tests"):
        shutil.copytree(ROOT / folder, where / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in broken_texts(breakage).items():
        (where / name).write_text(text)


def bite(name: str, breakage: Breakage, seeds: int, first: int) -> str:
    """Run the nemeses on the broken copy; tell what they found."""
    with tempfile.TemporaryDirectory(prefix=f"durable-teeth-{name}-") as folder:
        copy = Path(folder)
        copy_broken(breakage, copy)
        report = copy / "report.json"
        command = [
            sys.executable,
            "-m",
            "tests.chaos",
            "--seed",
            str(first),
            "--seeds",
            str(seeds),
            "--settle",
            "10",
        ]
        command += [
            "--json",
            str(report),
            *(word for each in breakage.nemeses for word in ("--nemesis", each)),
        ]
        environ = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)
        if not report.exists() or done.returncode not in {0, 1}:
            return f"{name:<16} BROKE THE RUNNER: {done.stderr[-500:]}"
        runs = json.loads(report.read_text())
    caught = [run for run in runs if not run["ok"]]
    by: Counter[str] = Counter()
    for run in caught:
        by.update({violation.partition(",")[0] for violation in run["violations"]})
        by.update({"sums and ends" for _ in run["failures"][:1]})
    words = ", ".join(f"{each} ({count})" for each, count in by.most_common())
    verdict = "CAUGHT" if caught else "missed"
    example = (
        re.sub(r"\s+", " ", (caught[0]["violations"] or caught[0]["failures"])[0])[:140] if caught else ""
    )
    where = f"{len(caught)} of {len(runs)} runs ({', '.join(breakage.nemeses)})"
    return f"{name:<16} {verdict} in {where}: {words}  {example}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=list(BREAKAGES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    missed = 0
    for name in options.only or BREAKAGES:
        text = bite(name, BREAKAGES[name], options.seeds, options.seed)
        print(text, flush=True)
        missed += "missed" in text and name not in UNSEEN
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
