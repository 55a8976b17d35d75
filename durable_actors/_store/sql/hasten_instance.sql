-- hasten_instance: let a runnable instance that is not due yet run now: skip its delay, schedule or back-off. The command `run_now`.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb
-- returns  the receipt's result: "hastened"; "paused" if it is paused, too: it is due when it is resumed; "due" if it was due already, "waiting" if
--          it waits for what it comes after, "held" if something else than time holds it; nothing unless it is runnable
-- moves    hastened
-- locks    its row
-- index    gen_durable_pkey, receipts_once
-- keeps    attempt, visit and round: the run that was to come later comes now. Its place in its partition key is that of a row that became
--          due now. A row that is held stays as it is: only what holds it may release it. A paused one stays paused, without its delay.
with target as materialized (
    select y.id, y.hold, durable.due(y.eligible_at) as due
      from durable.gen_durable y
     where y.id = $1::bigint and y.status = 'runnable'
       for no key update
), hastened as (
    update durable.gen_durable g
       set eligible_at = durable.now(), rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from target t
     where g.id = t.id and t.hold in (0, 4) and not t.due
    returning g.id, case when g.journal >= 2 then durable.note(
                  g.id, g.rev, 'hastened', g.step, null, g.visit, g.attempt, g.round, commander => $2::text,
                  further => jsonb_build_object('command', jsonb_strip_nulls(jsonb_build_object(
                      'type', 'run_now', 'key', $4::text, 'reason', $3::text)) || jsonb_build_object('metadata', $5::jsonb))) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'run_now', 'instance', t.id::text, $2::text, $3::text, $4::text, $5::jsonb,
       to_jsonb(case when t.id in (select h.id from hastened h) then case when t.hold = 4 then 'paused' else 'hastened' end
                     when t.hold = 5 then 'waiting' when t.hold <> 0 then 'held' else 'due' end::text)
  from target t
returning r.result
