-- expire_awaits: wake instances of one queue whose await or barrier deadline has passed. A timeout is a wake, not a failure.
-- params   $1 queue text · $2 limit int
-- returns  id, …, whether the children that are left are to be cancelled
-- moves    unfit · expired
-- locks    FOR NO KEY UPDATE SKIP LOCKED: an instance that is being signalled is woken by the signal
-- index    gen_durable_deadline: the due ones alone, however many are parked
-- keeps    I7. A row whose partition key no index of runnable rows can hold (written by hand) fails alone: woken, it would
--          refuse the statement, and with it the queue's picks, for ever.
update durable.gen_durable g
   set status = (case when d.wide is null then 'runnable' else 'failed' end)::durable.durable_status,
       finished_at = case when d.wide is not null then durable.now() end,
       last_error = case when d.wide is null then g.last_error
                         else format('its partition key has %s bytes, at most 2000 are allowed', d.wide) end,
       error_type = case when d.wide is null then g.error_type end, traceback = case when d.wide is null then g.traceback end,
       eligible_at = durable.now(), step = coalesce(g.await_step, g.step), await_step = null,
       await_deadline = null, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
  from (select y.id, y.step, y.status, case when octet_length(y.partition_key) > 2000 then octet_length(y.partition_key) end as wide
          from durable.gen_durable y
         where y.queue = $1::text and y.status in ('awaiting_signal', 'awaiting_children') and y.await_deadline <= durable.now()
         order by y.await_deadline limit $2::int for no key update skip locked) d
 where g.id = d.id
returning g.id, case when g.journal >= case when d.wide is null then 3 else 1 end then durable.note(
              g.id, g.rev, case when d.wide is null then 'expired' else 'unfit' end, d.step, g.step, g.visit, g.attempt, g.round,
              failure => case when d.wide is not null then jsonb_build_object('text', g.last_error) end,
              further => case when d.wide is not null then jsonb_build_object('eligible_at', g.eligible_at) else jsonb_build_object(
                  'waited_for', case d.status when 'awaiting_signal' then 'signal' else 'children' end) end) end,
          case when g.cancel_rest and d.status = 'awaiting_children' and g.status = 'runnable' then durable.cascade(g.id, g.visit, null) end
