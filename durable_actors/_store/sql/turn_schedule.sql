-- turn_schedule: decide slots of a schedule: insert their instances, record what became of each, and set where it stands. Or pause it, …
-- params   $1 name text · $2 the rev that the decision was made at bigint · where it stands then: $3 next slot timestamptz · $4 fire at timestamptz ·
--          $5 last slot timestamptz · $6 remaining int · $7 buffered timestamptz · $8 paused jsonb, or null; slots that fire, arrays:
--          $9 slot timestamptz[] · $10 kind text[] · $11 unique key text[]; slots that do not: $12 first timestamptz[] · $13 last timestamptz[] ·
--          $14 count int[] · $15 reason text[] ("buffered": it waits); $16 seconds for which its records are kept float8; of the receipt, if it is
--          a command: $17 its name text, or null · $18 by text · $19 reason text · $20 idempotency key text · $21 data jsonb
-- returns  per slot that was to fire, in order; one row without a slot if none was: the slot as text, id or null, whether its queue is paused,
--          queue, priority; nothing if somebody else has turned it
-- moves    started
-- locks    the schedule's row; the new rows, in the order of the slots
-- index    gen_durable_unique, schedules_pkey, schedule_log_pkey, receipts_once
-- keeps    each slot is decided once: whoever comes second finds another rev, also after it has waited for the row, and writes nothing. The
--          instance, the record of its slot and the step of the schedule are one statement. The flag `inbox` makes every step read its slot.
with turned as (
    update durable.schedules s
       set next_slot = $3::timestamptz, fire_at = $4::timestamptz, last_slot = $5::timestamptz, remaining = $6::int,
           buffered = $7::timestamptz, paused = $8::jsonb, rev = s.rev + 1
     where s.name = $1::text and s.rev = $2::bigint
    returning s.*
), wanted as materialized (
    select t.name, f.slot, f.kind, f.key, f.ord, coalesce(t.spec ->> 'queue_paused', 'skip') <> 'insert' and f.kind in ('slot', 'caught_up') and exists (
               select 1 from durable.pauses p where p.queue = t.queue and p.fsm in ('', t.fsm) and durable.lasts(p.until)) as closed
      from turned t cross join unnest($9::timestamptz[], $10::text[], $11::text[]) with ordinality f(slot, kind, key, ord)
), started as (
    insert into durable.gen_durable as g (fsm, fsm_version, step, state, queue, priority, partition_key, unique_key, unique_scope,
                                          eligible_at, tags, meta, journal, fingerprint, max_attempts, fair_key, rate_limit, inbox)
    select t.fsm, t.fsm_version, t.step, t.state, t.queue, t.priority, t.partition_key, convert_to(w.key, 'UTF8'),
           '{runnable,executing,awaiting_signal,awaiting_children}'::durable.durable_status[], durable.now(), t.tags,
           coalesce(t.meta, '{}') || jsonb_build_object('durable:schedule', jsonb_build_object(
               'name', t.name, 'slot', to_char(w.slot at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'tz', t.spec -> 'tz', 'kind', w.kind)),
           t.journal, t.fingerprint, t.max_attempts, t.fair_key, t.rate_limit, true
      from turned t cross join wanted w where not w.closed order by w.ord
    on conflict (unique_guard) where unique_guard is not null do nothing
    returning g.id, g.meta -> 'durable:schedule' ->> 'slot' as slot, case when g.journal >= 2 then durable.note(
        g.id, 1, 'started', g.step, g.step, 1, 0, 0, further => jsonb_build_object(
            'row', jsonb_strip_nulls(jsonb_build_object(
                'fsm', g.fsm, 'fsm_version', g.fsm_version, 'step', g.step, 'queue', g.queue, 'priority', g.priority, 'journal', g.journal,
                'eligible_at', g.eligible_at, 'partition_key', g.partition_key, 'unique_key', chr(92) || 'x' || encode(g.unique_key, 'hex'),
                'unique_scope', g.unique_scope, 'tags', g.tags, 'inserted_at', g.inserted_at,
                'max_attempts', g.max_attempts, 'fair_key', g.fair_key, 'rate_limit', g.rate_limit,
                'fingerprint', chr(92) || 'x' || encode(g.fingerprint, 'hex')))
                || jsonb_build_object('meta', g.meta)
                || case when g.journal < 4 then '{}' else jsonb_build_object('state', g.state) end)) end
), decided as materialized (
    select w.*, s.id from wanted w left join started s on s.slot::timestamptz = w.slot
), noted as (
    insert into durable.schedule_log (name, slot, last_slot, slots, outcome, reason, kind, instance_id)
    select n.name, n.first, n.last, n.count, n.outcome, n.reason, n.kind, n.id
      from (select t.name, k.first, k.last, k.count, case when k.reason = 'buffered' then 'buffered' else 'skipped' end,
                   nullif(k.reason, 'buffered'), null, null::bigint
              from turned t
             cross join unnest($12::timestamptz[], $13::timestamptz[], $14::int[], $15::text[]) k(first, last, count, reason)
            union all
            select d.name, d.slot, d.slot, 1, case when d.id is null then 'skipped' else 'fired' end,
                   case when d.id is not null then null when d.closed then 'queue_paused' else 'overlap' end, d.kind, d.id
              from decided d) n(name, first, last, count, outcome, reason, kind, id)
     order by n.first
), forgotten as (
    delete from durable.schedule_log l using turned t
     where l.name = t.name and l.at < durable.now() - make_interval(secs => $16::float8)
), receipt as (
    insert into durable.receipts (command, scope, target, by, reason, idempotency_key, data, result)
    select $17::text, 'schedule', t.name, $18::text, $19::text, $20::text, $21::jsonb,
           coalesce((select jsonb_agg(d.id order by d.ord) from decided d where d.id is not null), 'null')
      from turned t where $17::text is not null and (exists (select 1 from decided d where d.id is not null) or not exists (select 1 from decided))
)
select to_char(d.slot at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), d.id, coalesce(d.closed, false), t.queue, t.priority
  from turned t left join decided d on true
 order by d.ord
