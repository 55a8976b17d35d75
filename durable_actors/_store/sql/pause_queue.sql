-- pause_queue: let nothing pick from a queue, or one machine in it, until it is resumed or a time has passed. A command.
-- params   $1 target text, as the receipts name it; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text ·
--          $5 data jsonb; $6 queue text · $7 machine text, or '' for all · $8 until timestamptz, or null · $9 or seconds from now float8
-- returns  the receipt's result: the pause as a JSON object; nothing if its end has passed
-- locks    its row in pauses. No pick waits for it, and it waits for none
-- index    pauses_pkey, receipts_once
-- keeps    no pick whose snapshot is younger than this commit claims a row: pick_instances and pick_instances_by_id read the table
--          themselves. Since when it is paused stays as it is if it is paused already; the rest is as this call says.
with paused as (
    insert into durable.pauses as p (queue, fsm, until, by, reason)
    select $6::text, $7::text, e.until, $2::text, $3::text
      from (select coalesce($8::timestamptz, durable.now() + make_interval(secs => $9::float8)) as until) e
     where durable.lasts(e.until)
    on conflict (queue, fsm) do update
       set until = excluded.until, by = excluded.by, reason = excluded.reason,
           at = case when durable.lasts(p.until) then p.at else excluded.at end
    returning p.queue, p.fsm, p.until, p.at, p.by, p.reason
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'pause', 'queue', $1::text, $2::text, $3::text, $4::text, $5::jsonb,
       jsonb_build_object('queue', p.queue, 'machine', nullif(p.fsm, ''), 'until', p.until, 'at', p.at, 'by', p.by, 'reason', p.reason)
  from paused p
returning r.result
