-- resolve_boundary: decide for an instance that waits for a person: proceed, approve or reject. A command.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb;
--          $6 the command text: proceed resolves a pause, approve and reject an approval · $7 comment text · $8 data for the step jsonb
-- returns  the receipt's result, which is the id; nothing if it does not wait for that decision. Then, of a rejection that has ended it, its
--          parent and that one's queue if this has opened the parent's barrier
-- moves    unfit · proceeded · approved · rejected · child_ended · joined
-- locks    its row, then its parent's: the order of every commit
-- index    gen_durable_pkey, receipts_once
-- keeps    one decision counts: the row lock orders it, another one, a cancel and the deadline, and only the first finds the boundary open.
--          The steps are those that the outcome named: a deploy in between changes nothing. I11 barriers release
--          exactly once: what the parent counts derives from the row that this statement ends. A parked row has no place in its partition
--          key, so nobody is promoted when it ends. Effect and receipt are one statement, also in a savepoint.
with target as materialized (
    select y.id, y.step, case when $6::text = 'reject' then y.manual ->> 'on_reject' else coalesce(y.manual ->> 'then', y.step) end as to_step,
           jsonb_strip_nulls(jsonb_build_object(
               'kind', case $6::text when 'proceed' then 'proceeded' when 'approve' then 'approved' else 'rejected' end,
               'by', $2::text, 'comment', $7::text, 'at', durable.now()))
           || case when $8::jsonb is null then '{}' else jsonb_build_object('data', $8::jsonb) end as decision
      from durable.gen_durable y
     where y.id = $1::bigint and y.status = 'awaiting_signal'
       and durable.waits_for(y.status, y.manual) = case $6::text when 'proceed' then 'pause' else 'approval' end
       for no key update
), decided as (
    update durable.gen_durable g
       set status = (case when t.to_step is null then 'failed' else 'runnable' end)::durable.durable_status,
           hold = case when t.to_step is null then 0 else durable.hold_of(g.request) end,
           finished_at = case when t.to_step is null then durable.now() end,
           last_error = case when t.to_step is not null then g.last_error
                             else 'rejected' || coalesce(' by ' || $2::text, '') || coalesce(': ' || coalesce($7::text, $3::text), '') end,
           error_type = case when t.to_step is not null then g.error_type end, traceback = case when t.to_step is not null then g.traceback end,
           manual = case when t.to_step is not null then g.manual || jsonb_build_object('decision', t.decision) end,
           eligible_at = case when t.to_step is null then g.eligible_at else durable.now() end, step = coalesce(t.to_step, g.step), await_step = null, await_deadline = null,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from target t
     where g.id = t.id
    returning g.id, g.parent_id, case when t.to_step is null then durable.count_ended(g.parent_id, g.barrier) end as opened,
              case when g.journal >= case when t.to_step is null then 1 else 2 end then durable.note(
                  g.id, g.rev, t.decision ->> 'kind', t.step, t.to_step, g.visit, g.attempt, g.round, commander => $2::text,
                  failure => case when t.to_step is null then jsonb_build_object('text', g.last_error) end,
                  further => jsonb_build_object('decision', t.decision, 'command', jsonb_strip_nulls(jsonb_build_object(
                                 'type', $6::text, 'key', $4::text, 'reason', $3::text)) || jsonb_build_object('metadata', $5::jsonb))
                             || case when t.to_step is null then '{"failed": true}' else '{}'::jsonb end) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select $6::text, 'instance', d.id::text, $2::text, $3::text, $4::text,
       jsonb_strip_nulls(jsonb_build_object('comment', $7::text)) || $5::jsonb, to_jsonb(d.id)
  from decided d
returning r.result, (select case when d.opened is not null then d.parent_id end from decided d), (select d.opened from decided d)
