-- delete_schedule: delete a schedule and its records. A command.
-- params   $1 name text; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb
-- returns  the receipt's result, which is true; nothing if there is no such schedule
-- locks    the schedule's row
-- index    schedules_pkey, schedule_log_pkey, receipts_once
with gone as (
    delete from durable.schedules s where s.name = $1::text returning s.name
), forgotten as (
    delete from durable.schedule_log l using gone g where l.name = g.name
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'delete', 'schedule', g.name, $2::text, $3::text, $4::text, $5::jsonb, 'true' from gone g
returning r.result
