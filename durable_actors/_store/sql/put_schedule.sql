-- put_schedule: create a schedule, or replace its definition. A command, or what the code of a node says.
-- params   $1 name text · $2 the rev that it was read at bigint, 0 if there was none; its definition: $3 spec jsonb · $4 fsm text · $5 version int ·
--          $6 step text · $7 state jsonb · $8 queue text · $9 priority smallint · $10 partition key text · $11 tags text[] · $12 meta jsonb ·
--          $13 journal level smallint · $14 fingerprint text (hexadecimal); who defines it: $15 origin text · $16 revisions text[] ·
--          $17 overridden jsonb; where it stands: $18 next slot timestamptz · $19 fire at timestamptz · $20 last slot timestamptz · $21 remaining int;
--          slots of the old definition that are skipped, arrays: $22 first timestamptz[] · $23 last timestamptz[] · $24 count int[] ·
--          $25 reason text[]; of the receipt, if it is a command: $26 its name text, or null · $27 by text · $28 reason text ·
--          $29 idempotency key text · $30 data jsonb; of its definition, too: $31 max_attempts int · $32 fair key text · $33 limits text
-- returns  its new rev; nothing if somebody else has changed it
-- locks    the schedule's row
-- index    schedules_pkey, schedule_log_pkey, receipts_once
-- keeps    its pause, the slot that waits, and its records
with put as (
    insert into durable.schedules as s (name, spec, fsm, fsm_version, step, state, queue, priority, partition_key, tags, meta, journal, fingerprint,
                                        origin, revisions, overridden, next_slot, fire_at, last_slot, remaining, max_attempts, fair_key, rate_limit)
    values ($1::text, $3::jsonb, $4::text, $5::int, $6::text, $7::jsonb, $8::text, $9::smallint, $10::text, $11::text[], $12::jsonb, $13::smallint,
            decode($14::text, 'hex'), $15::text, $16::text[], $17::jsonb, $18::timestamptz, $19::timestamptz, $20::timestamptz, $21::int,
            $31::int, $32::text, $33::text)
    on conflict (name) do update
       set spec = excluded.spec, fsm = excluded.fsm, fsm_version = excluded.fsm_version, step = excluded.step, state = excluded.state,
           queue = excluded.queue, priority = excluded.priority, partition_key = excluded.partition_key, tags = excluded.tags,
           meta = excluded.meta, journal = excluded.journal, fingerprint = excluded.fingerprint, origin = excluded.origin,
           revisions = excluded.revisions, overridden = excluded.overridden, next_slot = excluded.next_slot, fire_at = excluded.fire_at,
           last_slot = excluded.last_slot, remaining = excluded.remaining, max_attempts = excluded.max_attempts,
           fair_key = excluded.fair_key, rate_limit = excluded.rate_limit, disabled_at = null, changed_at = durable.now(), rev = s.rev + 1
     where s.rev = $2::bigint
    returning s.name, s.rev
), noted as (
    insert into durable.schedule_log (name, slot, last_slot, slots, outcome, reason)
    select p.name, k.first, k.last, k.count, 'skipped', k.reason
      from put p cross join unnest($22::timestamptz[], $23::timestamptz[], $24::int[], $25::text[]) k(first, last, count, reason)
), receipt as (
    insert into durable.receipts (command, scope, target, by, reason, idempotency_key, data, result)
    select $26::text, 'schedule', p.name, $27::text, $28::text, $29::text, $30::jsonb, 'null' from put p where $26::text is not null
)
select p.rev from put p
