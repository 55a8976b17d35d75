-- expire_awaits: wake instances of one queue whose await or barrier deadline has passed. A timeout is a wake, not a failure.
-- params   $1 queue text · $2 limit int
-- returns  id
-- locks    FOR NO KEY UPDATE SKIP LOCKED: one that is being signalled wakes by that
-- index    gen_durable_deadline: the due ones alone, however many are parked
-- keeps    I7
update durable.gen_durable g
   set status = 'runnable', eligible_at = now(), step = coalesce(g.await_step, g.step), await_step = null,
       await_deadline = null, rev = g.rev + 1, updated_at = now()
 where g.id = any (array(
    select y.id from durable.gen_durable y
     where y.queue = $1::text and y.status in ('awaiting_signal', 'awaiting_children') and y.await_deadline <= now()
     order by y.await_deadline limit $2::int for no key update skip locked))
returning g.id
