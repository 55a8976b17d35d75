-- release_claims: release claims without an outcome (drain, a contended key); not counted as crashes.
-- params   $1 id bigint[] · $2 claim uuid[] · $3 attempts to add int (0: never ran, or a drain ended it · 1: was cancelled) ·
--          $4 hold smallint (1: its key is busy elsewhere; it keeps its place and is offered again later · 2: this node's code
--          lost its step; shelved) · $5 interruptions to add int (1: a drain ended its run)
-- returns  id, queue, partition_key, status of the released ones: runnable (held if it is paused), or cancelled if that was requested; whether
--          its children are to be cancelled
-- moves    cancelled · compensating · released
-- locks    FOR NO KEY UPDATE SKIP LOCKED in id order; for a row that ends also its parent, whose barrier join_parents counts next. Never
--          waits: one that is locked, or whose parent is, is not released, and the flusher tries it again
-- index    gen_durable_pkey
-- keeps    I4 a stale write changes nothing. Counters stop at their ends: an overflow would refuse the whole batch, for ever.
with mine as materialized (
    select y.id, y.parent_id, y.barrier, y.claim_id as claim, y.locked_by as owner, y.request, x.undo,
           y.partition_key, durable.asked_to_cancel(y.request) and x.undo is null as ends
      from unnest($1::bigint[], $2::uuid[]) u(id, claim)
      join durable.gen_durable y on y.id = u.id and y.claim_id = u.claim and y.locked_by is not null
     cross join lateral (select case when durable.asked_to_cancel(y.request) then durable.compensation(y.request, y.partition_key) end) x(undo)
     order by y.id for no key update of y skip locked
), parents as materialized (
    select p.id from durable.gen_durable p
     where p.id = any (array(select m.parent_id from mine m where m.ends and m.barrier is not null))
       and p.status::text = 'awaiting_children'
     order by p.id for no key update skip locked
), entered as materialized (
    select m.id, durable.compensate(m.id, m.request, m.undo) as queue, m.partition_key, m.request from mine m where m.undo is not null
), given_back as (
update durable.gen_durable g
   set status = (case when m.ends then 'cancelled' else 'runnable' end)::durable.durable_status,
       hold = case when m.ends then 0 when durable.asked_to_pause(g.request) then 4 else $4::smallint end,
       shelved_step = case when $4::smallint = 2 and not m.ends and not durable.asked_to_pause(g.request) then g.step else g.shelved_step end,
       attempt = case when m.ends then g.attempt else least(g.attempt, 2147483647 - $3::int) + $3::int end,
       interruptions = case when m.ends then g.interruptions else least(g.interruptions, 2147483647 - $5::int) + $5::int end,
       finished_at = case when m.ends then durable.now() end,
       last_error = case when m.ends then g.request ->> 'reason' else g.last_error end,
       error_type = case when not m.ends then g.error_type end, traceback = case when not m.ends then g.traceback end,
       children_pending = case when m.ends then 0 else g.children_pending end, wake_on_failure = g.wake_on_failure and not m.ends,
       rev = least(g.rev, 9223372036854775806) + 1,
       locked_by = null, lease_expires_at = null, claim_id = null, claim_token_hash = null, updated_at = durable.now()
  from mine m
 where g.id = m.id and m.undo is null
   and (not m.ends or m.barrier is null or m.parent_id = any (array(select p.id from parents p))
        or not exists (select 1 from durable.gen_durable p
                        where p.id = m.parent_id and p.visit = m.barrier and p.status::text = 'awaiting_children'))
returning g.id, g.queue, g.partition_key, g.status::text,
          case when m.ends and durable.asked_for_children(g.request) then durable.cascade(g.id, null, g.request) end as cascades,
          case when m.ends and g.journal >= 2
               then durable.note_cancelled(g.id, g.rev, g.step, g.visit, g.attempt, g.round, g.request, g.last_error)
               when g.journal >= 3 then durable.note(
                   g.id, g.rev, 'released', g.step, null, g.visit, g.attempt - $3::int, g.round, m.claim, m.owner,
                   further => jsonb_build_object('to_attempt', g.attempt, 'eligible_at', g.eligible_at, 'hold', g.hold,
                                                 'interrupted', $5::int > 0)) end
)
select b.id, b.queue, b.partition_key, b.status, b.cascades from given_back b
union all
select n.id, n.queue, n.partition_key, 'runnable', durable.asked_for_children(n.request) from entered n
