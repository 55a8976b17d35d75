-- recheck_awaits: wake instances that this transaction parked although a signal they await is already there.
-- params   $1 id bigint[] · $2 signal bigint[]: those to ignore, seen by the steps and kept by them
-- returns  id of the woken ones
-- moves    woken
-- locks    none new: the rows are ours. A second statement, so its snapshot is newer than the park's: a signal that was
--          committed while the park waited for the row lock is seen.
-- index    gen_durable_pkey, signals_inbox
-- keeps    I7 no wake-up is lost. What the step has seen and keeps (a set of ids, never a maximum: ids commit out of order)
--          does not wake it again, so re-awaiting does not spin.
-- cost     "not in" is a hashed subplan: linear, where an anti-join without hash joins would be quadratic
update durable.gen_durable g
   set status = 'runnable', hold = durable.hold_of(g.request), eligible_at = durable.now(), step = coalesce(g.await_step, g.step),
       await_step = null, await_deadline = null, rev = least(g.rev, 9223372036854775806) + 1
 from (select y.id, y.step from durable.gen_durable y where y.id = any ($1::bigint[])) w
 where g.id = w.id and g.id = any ($1::bigint[]) and g.xmin = pg_current_xact_id()::xid and g.status = 'awaiting_signal'
   and exists (
       select 1 from durable.signals s
        where s.target_id = g.id and s.name = any (g.awaits) and s.consumed_at is null
          and s.id not in (select k.id from unnest($2::bigint[]) k(id)))
returning g.id, case when g.journal >= 3 then durable.note(g.id, g.rev, 'woken', w.step, g.step, g.visit, g.attempt, g.round) end
