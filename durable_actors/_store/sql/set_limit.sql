-- set_limit: let an operator's definition of a limit count instead of the code's, or the code's again. A command.
-- params   $1 name text; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb;
--          $6 the override jsonb, or null to clear it · $7 seconds for one token float8 or null · $8 burst float8 · $9 slots int or null
-- returns  the receipt's result: the name; nothing if there is nothing to clear, or if the key of the command was used before
-- locks    the limit's row; lines of limit_waits, SKIP LOCKED
-- index    limits_pkey, receipts_once
-- keeps    what is throttled is looked at again at once, so it acts with the next pick, in both directions
with cleared as (
    update durable.limits l
       set override = null, set_at = null, set_by = null, reason = null,
           interval = (l.declared ->> 'per')::float8 / (l.declared ->> 'rate')::float8,
           burst = coalesce((l.declared ->> 'burst')::float8, greatest(ceil((l.declared ->> 'rate')::float8), 1), 1),
           slots = (l.declared ->> 'slots')::int,
           on_full = coalesce(l.declared ->> 'on_full', 'wait'), held = coalesce(l.declared ->> 'held', 'step')
     where $6::jsonb is null and l.name = $1::text and l.override is not null and l.declared is not null
    returning l.name
), deleted as (
    delete from durable.limits l where $6::jsonb is null and l.name = $1::text and l.override is not null and l.declared is null
    returning l.name
), written as (
    insert into durable.limits as l (name, override, set_at, set_by, reason, interval, burst, slots, on_full, held)
    select $1::text, $6::jsonb, durable.now(), $2::text, $3::text, $7::float8, $8::float8, $9::int,
           coalesce($6::jsonb ->> 'on_full', 'wait'), coalesce($6::jsonb ->> 'held', 'step') where $6::jsonb is not null
        on conflict (name) do update
       set override = excluded.override, set_at = excluded.set_at, set_by = excluded.set_by, reason = excluded.reason,
           interval = excluded.interval, burst = excluded.burst, slots = excluded.slots,
           on_full = excluded.on_full, held = excluded.held
    returning l.name
), done as materialized (
    select name from cleared union all select name from deleted union all select name from written
), looked as (
    update durable.limit_waits w set next_at = durable.now()
     where (w.key, w.queue) in (select x.key, x.queue from durable.limit_waits x
                                 where split_part(x.key, ':', 1) in (select d.name from done d) for update skip locked)
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select case when $6::jsonb is null then 'clear' else 'set' end, 'limit', d.name, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(d.name) from done d
returning r.result
