-- restore_instance: write the row of an instance that is gone, as its journal says, without a claim. A command.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb;
--          $6 all columns jsonb · $7 the last record's rev bigint · $8 a claim that this ends uuid, or null · $9 its owner text
-- returns  the receipt's result, which is the id; nothing if a record was written since
-- moves    restored
-- locks    the new row. A row that somebody inserted meanwhile refuses it: gen_durable_pkey
-- index    gen_durable_pkey, journal_pkey, receipts_once
-- fence    the rev of the last record
-- keeps    as rebuild_instance; its return is always recorded. Its signals went with the row.
with told as materialized (
    select t.* from jsonb_populate_record(null::durable.gen_durable, $6::jsonb) t
), restored as (
    insert into durable.gen_durable (
        id, parent_id, visit, rev, eligible_at, await_deadline, inserted_at, updated_at, finished_at, claim_id, status, fsm_version, attempt,
        crashes, children_pending, weight, priority, hold, fsm, step, queue, partition_key, rate_limit, claim_token_hash, awaits,
        await_step, last_error, unique_key, unique_scope, state, result, barrier, children_total, wake_on_failure, child_uid, round,
        interruptions, tags, meta, child_args, error_type, traceback, shelved_step, limited_by, request, manual, journal, fingerprint, rerun_of, cancellation, cancel_rest, child_key, links, max_attempts, fair_key, inbox)
    overriding system value
    select $1::bigint, t.parent_id, t.visit, t.rev, t.eligible_at, t.await_deadline, t.inserted_at, durable.now(), t.finished_at, t.claim_id,
           t.status, t.fsm_version, t.attempt, t.crashes, t.children_pending, coalesce(t.weight, 1), t.priority, t.hold, t.fsm, t.step,
           t.queue, t.partition_key, t.rate_limit, t.claim_token_hash, t.awaits, t.await_step, t.last_error, t.unique_key,
           coalesce(t.unique_scope, '{}'), coalesce(t.state, 'null'), case when t.status = 'done' then coalesce(t.result, 'null') end, t.barrier, t.children_total, t.wake_on_failure, t.child_uid,
           t.round, t.interruptions, t.tags, t.meta, t.child_args, t.error_type, t.traceback, t.shelved_step, t.limited_by, t.request, t.manual, t.journal, t.fingerprint,
           t.rerun_of, t.cancellation, t.cancel_rest, t.child_key, t.links, t.max_attempts, t.fair_key, coalesce(t.meta ? 'durable:schedule', false)
      from told t
     where not exists (select 1 from durable.journal j where j.instance_id = $1::bigint and j.rev > $7::bigint)
    returning id, case when $8::uuid is not null then durable.note(
                  id, rev, 'released', step, null, visit, attempt, round, $8::uuid, $9::text, commander => $2::text,
                  further => jsonb_build_object('to_attempt', attempt, 'eligible_at', eligible_at))
              else durable.note(
                  id, rev, 'snapshot', step, null, visit, attempt, 0, commander => $2::text, further => jsonb_build_object(
                      'row', $6::jsonb, 'command', jsonb_strip_nulls(jsonb_build_object('type', 'rebuild', 'key', $4::text, 'reason', $3::text))
                                                   || jsonb_build_object('metadata', $5::jsonb))) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'rebuild', 'instance', b.id::text, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(b.id) from restored b
returning r.result
