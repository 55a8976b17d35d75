-- join_parents: count ended children at the current barrier of their parents; open the barriers that are complete.
-- params   $1 ended children bigint[]
-- returns  parent id, queue of those whose barrier opened, whether the children that are left are to be cancelled
-- moves    unfit · child_ended · joined
-- locks    the parents, in id order. One update per parent and statement, however many children end together. Only children
--          that this transaction ended: a repeated or stale outcome counts nothing.
--          A parent that does not wait, or waits at another barrier, is not locked: the barrier of these children will not come
--          back (the next one has another visit), and the parent's own outcome may be in a flush that waits for ours.
-- plan     "coalesce" keeps the "in" a hashed subplan: as a join, without hash joins, it would be quadratic
-- index    gen_durable_pkey
-- keeps    I11 barriers release exactly once
-- hostile  a parent whose partition key no index of runnable rows can hold (only a hand writes one) fails alone: woken, it
--          would refuse the outcomes of its children, for ever
with ended as materialized (
    select c.parent_id, c.barrier, count(*)::int as n, bool_or(c.status <> 'done') as failed
      from durable.gen_durable c
     where c.id = any ($1::bigint[]) and c.xmin = pg_current_xact_id()::xid
       and c.parent_id is not null and c.barrier is not null and c.status in ('done', 'failed', 'cancelled')
     group by c.parent_id, c.barrier
), parents as materialized (
    select p.id, p.step from durable.gen_durable p
     where p.id = any (array(select e.parent_id from ended e)) and p.status::text = 'awaiting_children'
       and coalesce((p.id, p.visit) in (select e.parent_id, e.barrier from ended e), false)
     order by p.id for no key update
), counted as (
    update durable.gen_durable p
       set children_pending = greatest(p.children_pending - e.n, 0),
           status = case when not (p.children_pending <= e.n or (p.wake_on_failure and e.failed)) then p.status
                         when octet_length(p.partition_key) > 2000 then 'failed' else 'runnable' end,
           hold = case when p.request is not null and octet_length(p.partition_key) > 2000 is not true
                            and (p.children_pending <= e.n or (p.wake_on_failure and e.failed)) then durable.hold_of(p.request)
                       else p.hold end,
           finished_at = case when octet_length(p.partition_key) > 2000 and (p.children_pending <= e.n or (p.wake_on_failure and e.failed))
                              then durable.now() end,
           last_error = case when octet_length(p.partition_key) > 2000 and (p.children_pending <= e.n or (p.wake_on_failure and e.failed))
                             then format('its partition key has %s bytes, at most 2000 are allowed', octet_length(p.partition_key))
                             else p.last_error end,
           error_type = case when octet_length(p.partition_key) > 2000 and (p.children_pending <= e.n or (p.wake_on_failure and e.failed)) then null
                             else p.error_type end,
           traceback = case when octet_length(p.partition_key) > 2000 and (p.children_pending <= e.n or (p.wake_on_failure and e.failed)) then null
                            else p.traceback end,
           eligible_at = case when p.children_pending <= e.n or (p.wake_on_failure and e.failed) then durable.now()
                              else p.eligible_at end,
           step = case when p.children_pending <= e.n or (p.wake_on_failure and e.failed)
                       then coalesce(p.await_step, p.step) else p.step end,
           await_step = case when p.children_pending <= e.n or (p.wake_on_failure and e.failed) then null else p.await_step end,
           await_deadline = case when p.children_pending <= e.n or (p.wake_on_failure and e.failed) then null
                                 else p.await_deadline end,
           rev = least(p.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from ended e
     -- By id and barrier alone: the status is tested on the newest version, which the lock above has waited for.
     where p.id = e.parent_id and p.id = any (array(select q.id from parents q)) and p.visit = e.barrier
       and p.status::text = 'awaiting_children'
    returning p.id, p.queue, p.status,
              case when p.cancel_rest and p.status = 'runnable' then durable.cascade(p.id, p.visit, null) end as cascades,
              case when p.journal >= case when p.status = 'failed' then 1 else 3 end then durable.note(
                  p.id, p.rev, case p.status when 'runnable' then 'joined' when 'failed' then 'unfit' else 'child_ended' end,
                  (select q.step from parents q where q.id = p.id), case when p.status <> 'awaiting_children' then p.step end, p.visit, p.attempt, p.round,
                  failure => case when p.status = 'failed' then jsonb_build_object('text', p.last_error) end,
                  further => case when p.status = 'failed'
                             then jsonb_build_object('eligible_at', p.eligible_at, 'children_pending', p.children_pending)
                             else jsonb_build_object('count', e.n, 'failed', e.failed, 'pending', p.children_pending) end) end
)
select c.id, c.queue, c.cascades from counted c where c.status = 'runnable'
