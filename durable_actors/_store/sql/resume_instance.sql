-- resume_instance: end the pause of an instance. A command.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb
-- returns  the receipt's result, which is the id; nothing if it is not paused
-- moves    resumed
-- locks    its row
-- index    gen_durable_pkey, receipts_once
-- keeps    what it comes after: if that has not ended, it waits on. Its siblings: whether it is its turn is decided by the pick, as for every row that becomes due. Effect and receipt are one
--          statement, also in a savepoint. A row that is held with reason 4 and has not that request (only a hand writes one) is resumed, too.
with resumed as (
    update durable.gen_durable g
       set hold = case when g.status = 'runnable' and g.hold = 4 then durable.hold_of_resumed(g.id, g.links, g.cancellation) else g.hold end, request = null,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from (select y.id from durable.gen_durable y
             where y.id = $1::bigint and y.status in ('runnable', 'executing', 'awaiting_signal', 'awaiting_children')
               and (durable.asked_to_pause(y.request) or (y.status = 'runnable' and y.hold = 4))
               for no key update) t
     where g.id = t.id
    returning g.id, case when g.journal >= 2 then durable.note(
                  g.id, g.rev, 'resumed', g.step, null, g.visit, g.attempt, g.round, commander => $2::text,
                  further => jsonb_build_object('command', jsonb_strip_nulls(jsonb_build_object(
                      'type', 'resume', 'key', $4::text, 'reason', $3::text)) || jsonb_build_object('metadata', $5::jsonb))
                      || case when g.hold = 5 then '{"hold": 5}' else '{}'::jsonb end) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'resume', 'instance', a.id::text, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(a.id) from resumed a
returning r.result
