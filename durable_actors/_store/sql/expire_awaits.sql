-- expire_awaits: wake instances of one queue whose await or barrier deadline has passed. A timeout is a wake, not a failure; but an approval
--          that nobody decided is as good as rejected: it enters await_step (on_timeout, else on_reject), or has failed. Never "then".
-- params   $1 queue text · $2 limit int
-- returns  id · status: runnable or failed · of an approval that has failed: its parent, and that one's queue if this has opened its barrier ·
--          whether the children that are left are to be cancelled
-- moves    unfit · expired · timed_out · child_ended · joined
-- locks    FOR NO KEY UPDATE SKIP LOCKED: an instance that is being signalled or decided is woken by that. First, as reap_claims does, the
--          parents whose barriers count an approval that ends here: one that is locked, or whose own deadline has passed (a row is written
--          once per statement), leaves its child for the next call
-- index    gen_durable_deadline: the due ones alone, however many are parked
-- keeps    I7. I11 barriers release exactly once: what a parent counts derives from the row that this ends. A row whose partition key no
--          index of runnable rows can hold (written by hand) fails alone: woken, it would refuse the statement, and with it the
--          queue's picks, for ever.
with parents as materialized (
    select p.id from durable.gen_durable p
     where p.id = any (array(
              select y.parent_id from durable.gen_durable y
               where y.queue = $1::text and y.status in ('awaiting_signal', 'awaiting_children') and y.await_deadline <= durable.now()
                 and y.manual is not null and y.barrier is not null and y.await_step is null
               order by y.await_deadline limit $2::int))
       and p.status::text = 'awaiting_children' and (p.await_deadline is null or p.await_deadline > durable.now())
     order by p.id for no key update skip locked
)
update durable.gen_durable g
   set status = (case when d.fault is null then 'runnable' else 'failed' end)::durable.durable_status,
       hold = case when d.fault is null then durable.hold_of(g.request) else 0 end,
       finished_at = case when d.fault is not null then durable.now() end,
       last_error = coalesce(d.fault, g.last_error),
       error_type = case when d.fault is null then g.error_type end, traceback = case when d.fault is null then g.traceback end,
       manual = case when not d.asks then g.manual
                     when d.fault is null then g.manual || jsonb_build_object('decision', jsonb_build_object('kind', 'timed_out', 'at', durable.now())) end,
       eligible_at = case when d.to_step is null then g.eligible_at else durable.now() end, step = coalesce(d.to_step, g.step), await_step = null,
       await_deadline = null, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
  from (select y.id, y.step, y.status, w.asks, w.wide, w.to_step,
               case when w.wide then format('its partition key has %s bytes, at most 2000 are allowed', octet_length(y.partition_key))
                    when w.to_step is null then 'nobody decided in time' || coalesce(': ' || (y.manual ->> 'title'), '') end as fault
          from durable.gen_durable y
         cross join lateral (select coalesce(octet_length(y.partition_key) > 2000, false) as wide, a.asks,
                                    case when a.asks then y.await_step else coalesce(y.await_step, y.step) end as to_step
                               from (select durable.waits_for(y.status, y.manual) not in ('signal', 'children') as asks) a) w
         where y.queue = $1::text and y.status in ('awaiting_signal', 'awaiting_children') and y.await_deadline <= durable.now()
           and (not w.asks or w.to_step is not null or y.barrier is null or y.parent_id = any (array(select p.id from parents p))
                or not exists (select 1 from durable.gen_durable p
                                where p.id = y.parent_id and p.visit = y.barrier and p.status::text = 'awaiting_children'))
         order by y.await_deadline limit $2::int for no key update of y skip locked) d
 where g.id = d.id
returning g.id, g.status, case when d.asks and not d.wide and g.status = 'failed' then g.parent_id end,
          case when d.asks and not d.wide and g.status = 'failed' then durable.count_ended(g.parent_id, g.barrier) end,
          case when g.cancel_rest and d.status = 'awaiting_children' and g.status = 'runnable' then durable.cascade(g.id, g.visit, null) end,
          case when g.journal >= case when d.fault is not null then 1 when d.asks then 2 else 3 end then durable.note(
              g.id, g.rev, case when d.wide then 'unfit' when d.asks then 'timed_out' else 'expired' end, d.step,
              case when not d.asks or d.wide or d.fault is null then g.step end, g.visit, g.attempt, g.round,
              failure => case when d.fault is not null then jsonb_build_object('text', g.last_error) end,
              further => case when d.wide then jsonb_build_object('eligible_at', g.eligible_at)
                              when d.asks and d.fault is not null then jsonb_build_object('failed', true)
                              when d.asks then jsonb_build_object('decision', g.manual -> 'decision')
                              else jsonb_build_object('waited_for', case d.status when 'awaiting_signal' then 'signal' else 'children' end) end) end
