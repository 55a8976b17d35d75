-- rebuild_instance: make a row what its journal says, without a claim. A command.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb;
--          $6 the columns jsonb: those that it names are written · $7 the row's rev as it was read bigint · $8 the last record's rev
--          bigint · $9 a claim that this ends uuid, or null · $10 its owner text · $11 whether to record the row bool
-- returns  the receipt's result, which is the id; nothing if the row has moved since
-- moves    released · rebuilt · snapshot
-- locks    its row
-- index    gen_durable_pkey, journal_pkey, receipts_once
-- fence    the rev of the row and that of the last record: a move in between changes both
-- keeps    I1: a worker that holds a claim of the row is fenced out, because the claim's id is gone; the end of a claim that the journal has
--          is recorded as its release, and the repair of another row that was wrong as a snapshot. The inbox is what the table of signals
--          says.
with told as materialized (
    select (jsonb_populate_record(g, $6::jsonb)).* from durable.gen_durable g where g.id = $1::bigint
), rebuilt as (
    update durable.gen_durable g
       set parent_id = t.parent_id, visit = t.visit, rev = t.rev, eligible_at = t.eligible_at, lease_expires_at = null,
           await_deadline = t.await_deadline, inserted_at = t.inserted_at, updated_at = durable.now(), finished_at = t.finished_at,
           claim_id = t.claim_id, status = t.status, fsm_version = t.fsm_version, attempt = t.attempt, crashes = t.crashes,
           children_pending = t.children_pending, priority = t.priority, weight = t.weight, rate_limit = t.rate_limit, hold = t.hold, fsm = t.fsm, step = t.step, queue = t.queue,
           partition_key = t.partition_key, locked_by = null, claim_token_hash = t.claim_token_hash, awaits = t.awaits,
           await_step = t.await_step, last_error = t.last_error, unique_key = t.unique_key, unique_scope = t.unique_scope,
           state = coalesce(t.state, 'null'), result = case when t.status = 'done' then coalesce(t.result, 'null') end, barrier = t.barrier, children_total = t.children_total,
           wake_on_failure = t.wake_on_failure, child_uid = t.child_uid, round = t.round, interruptions = t.interruptions, tags = t.tags,
           meta = t.meta, child_args = t.child_args, error_type = t.error_type, traceback = t.traceback, shelved_step = t.shelved_step, limited_by = t.limited_by,
           request = case when durable.asked_to_pause(t.request) and durable.asked_to_pause(g.request) then g.request else t.request end, manual = t.manual,
           journal = t.journal, fingerprint = t.fingerprint, rerun_of = t.rerun_of, cancellation = t.cancellation,
           cancel_rest = t.cancel_rest, child_key = t.child_key, links = t.links, max_attempts = t.max_attempts, fair_key = t.fair_key,
           -- Also a tombstone: it goes with the row only if the row says that it has signals.
           inbox = exists (select 1 from durable.signals s where s.target_id = $1::bigint and s.consumed_at is null)
                   or exists (select 1 from durable.signals s where s.target_id = $1::bigint and s.dedup_key is not null)
                   or coalesce(t.meta ? 'durable:schedule', false)  -- every step reads its slot
      from told t
     where g.id = $1::bigint and g.id = t.id and g.rev = $7::bigint
       and not exists (select 1 from durable.journal j where j.instance_id = $1::bigint and j.rev > $8::bigint)
    returning g.id, case when $9::uuid is not null then durable.note(
                  g.id, g.rev, 'released', g.step, null, g.visit, g.attempt, g.round, $9::uuid, $10::text, commander => $2::text,
                  further => jsonb_build_object('to_attempt', g.attempt, 'eligible_at', g.eligible_at))
              when $11::bool then durable.note(
                  g.id, g.rev, 'snapshot', g.step, null, g.visit, g.attempt, 0, commander => $2::text, further => jsonb_build_object(
                      'row', $6::jsonb, 'command', jsonb_strip_nulls(jsonb_build_object('type', 'rebuild', 'key', $4::text, 'reason', $3::text))
                                                   || jsonb_build_object('metadata', $5::jsonb))) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'rebuild', 'instance', b.id::text, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(b.id) from rebuilt b
returning r.result
