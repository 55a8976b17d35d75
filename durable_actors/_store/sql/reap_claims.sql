-- reap_claims: take back claims whose lease has expired or whose node was proved dead; the step runs again.
-- params   $1 limit int · $2 dead owners text[] · $3 max crashes int or null · $4 the latest end of a lease that was seen of
--          each dead owner float8[], seconds since the epoch: one that was renewed since then is not dead · $5 schema text, for the
--          lock of a dead owner: one that has taken it again since it was found dead is back
-- returns  id, queue, partition_key, status (runnable; failed when the step crashed too often, or cancelled if that was requested or it compensated: it
--          keeps its inbox), fsm, step, why it failed, whether its children are to be cancelled
-- moves    cancelled · compensating · reaped · unfit
-- locks    FOR NO KEY UPDATE SKIP LOCKED in id order: any number of reapers, never waiting. Before them the parents whose
--          barrier must count a child that ends (join_parents, in the same transaction), SKIP LOCKED, too: a child whose
--          parent somebody else has locked stays as it is until the next round.
-- index    gen_durable_executing, gen_durable_pkey, nodes_pkey
-- keeps    I2, I12 nothing stays executing without a live owner. Clearing claim_id fences the old owner out.
--          The record of a lease that is over has its end: renewals are not recorded, and one may have made it end sooner than
--          the record of the claim says (the server's clock was set back)
-- backoff  the first crash runs again at once, then after 1, 2, 4 … at most 300 seconds, so that a step which kills its
--          worker does not kill all of them
--          A node that has stopped cleanly leaves claims behind only if a thread was still running or a row was locked: they
--          were interrupted, not crashed. attempt and crashes stay as they are, interruptions is incremented.
-- hostile  a row written by hand must not block the batch for ever: counters stop at their limits; a lease longer than any
--          engine asks for (Config: 10 years) counts as expired; a partition key too long for the indexes of runnable
--          rows fails alone
-- plan     first who, by the index of executing rows, then the locks by primary key: "order by id limit" on the executing
--          rows themselves makes the planner walk the whole table by primary key until it has enough of them.
with locks as materialized (  -- read only if some owner is said to be dead
    select l.classid::bigint << 32 | l.objid::bigint as hash
      from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
), dead as materialized (
    select u.owner, to_timestamp(u.seen) + interval '1 millisecond' as seen from unnest($2::text[], $4::float8[]) u(owner, seen)
     where not exists (
        select 1 from durable.gen_durable z
         where z.status = 'executing' and z.locked_by = u.owner
           and z.lease_expires_at > to_timestamp(u.seen) + interval '1 millisecond')
       and hashtextextended($5::text || chr(2) || u.owner, 0) not in (select l.hash from locks l)
), over as materialized (
    select y.id from durable.gen_durable y
     where y.status = 'executing'
       and (y.lease_expires_at <= pg_catalog.now() or y.lease_expires_at > pg_catalog.now() + interval '11 years'
            or y.locked_by = any (array(select d.owner from dead d)))
), parents as materialized (
    select p.id from durable.gen_durable p
     where p.id = any (array(
              select y.parent_id from durable.gen_durable y
               where y.id = any (array(select o.id from over o)) and y.barrier is not null
                 and (y.crashes >= $3::int - 1 or octet_length(y.partition_key) > 2000 or durable.asked_to_cancel(y.request))))
       and p.status::text = 'awaiting_children'
     order by p.id for no key update skip locked
), mine as materialized (
    select y.id, y.claim_id as claim, y.locked_by as owner, y.lease_expires_at as lease, y.lease_expires_at <= pg_catalog.now() as expired,
           octet_length(y.partition_key) > 2000 as wide,
           x.asked or x.over as asked, case when x.asked then y.request ->> 'reason' else x.crashed end as reason,
           case when x.asked then durable.compensation(y.request, y.partition_key) end as undo, y.request, y.partition_key, y.fsm,
           case when x.asked or x.over then null when octet_length(y.partition_key) > 2000
                then format('its partition key has %s bytes, at most 2000 are allowed', octet_length(y.partition_key))
                else x.crashed end as fault, s.stopped
      from durable.gen_durable y
      cross join lateral (select exists (
          select 1 from durable.nodes n where n.incarnation = y.locked_by and n.stopped_at is not null) as stopped) s
      cross join lateral (select case when y.crashes >= $3::int - 1 and not s.stopped
           then format('quarantined: step %s ended %s without an outcome (its worker died or lost it)', left(y.step, 255),
                       case when y.crashes = 0 then 'once' else y.crashes + 1::bigint || ' times' end) end) q(crashed)
      cross join lateral (select q.crashed, durable.asked_to_cancel(y.request) as asked,  -- over: what compensates has crashed too often
                                 y.cancellation is not null and q.crashed is not null and octet_length(coalesce(y.partition_key, '')) <= 2000 as over) x
     where y.id = any (array(select o.id from over o))
       and (y.lease_expires_at <= pg_catalog.now() or y.lease_expires_at > pg_catalog.now() + interval '11 years'
            or y.lease_expires_at <= (select d.seen from dead d where d.owner = y.locked_by))
       and (y.barrier is null or not coalesce(y.crashes >= $3::int - 1 or octet_length(y.partition_key) > 2000 or durable.asked_to_cancel(y.request), false)
            or y.parent_id = any (array(select p.id from parents p))
            or not exists (select 1 from durable.gen_durable p
                            where p.id = y.parent_id and p.visit = y.barrier and p.status::text = 'awaiting_children'))
     order by y.id limit $1::int for no key update of y skip locked
), entered as materialized (
    select d.id, durable.compensate(d.id, d.request, d.undo) as queue, d.partition_key, d.fsm, d.undo, d.request from mine d where d.undo is not null
), taken as (
update durable.gen_durable g
   set status = (case when d.asked then 'cancelled' when d.fault is not null then 'failed' else 'runnable' end)::durable.durable_status,
       hold = case when d.fault is null then durable.hold_of(g.request) else 0 end,
       attempt = case when d.asked or d.stopped or d.fault is not null then g.attempt else least(g.attempt, 2147483646) + 1 end,
       crashes = case when d.asked or d.stopped then g.crashes else least(g.crashes, 2147483646) + 1 end,
       interruptions = case when d.stopped and not d.asked then least(g.interruptions, 2147483646) + 1 else g.interruptions end,
       rev = least(g.rev, 9223372036854775806) + 1,
       eligible_at = case when d.asked then g.eligible_at
                          else durable.now() + make_interval(secs => case when g.crashes = 0 or d.stopped then 0
                                                                          else least(2 ^ least(g.crashes - 1, 9), 300) end) end,
       last_error = case when d.asked then d.reason else coalesce(d.fault, g.last_error) end,
       error_type = case when d.fault is null and not d.asked then g.error_type end,
       traceback = case when d.fault is null and not d.asked then g.traceback end,
       finished_at = case when d.fault is not null or d.asked then durable.now() end,
       children_pending = case when d.asked then 0 else g.children_pending end, wake_on_failure = g.wake_on_failure and not d.asked,
       locked_by = null, lease_expires_at = null, claim_id = null, claim_token_hash = null, updated_at = durable.now()
  from mine d
 where g.id = d.id and d.undo is null
returning g.id, g.queue, g.partition_key, g.status::text, g.fsm, g.step, case when d.fault is not null then g.last_error end as fault,
          case when d.asked and durable.asked_for_children(g.request) then durable.cascade(g.id, null, g.request) end as cascades,
          case when d.asked then case when g.journal >= 2 then durable.note_cancelled(
                   g.id, g.rev, g.step, g.visit, g.attempt, g.round, g.request, d.reason) end
               when g.journal >= case when d.fault is not null then 1 else 3 end then durable.note(
              g.id, g.rev, case when d.wide then 'unfit' else 'reaped' end, g.step, null, g.visit,
              case when d.stopped or d.fault is not null then g.attempt else g.attempt - 1 end,
              g.round, d.claim, d.owner, case when d.fault is not null then jsonb_build_object('text', d.fault) end,
              case when d.wide
                   then jsonb_build_object('eligible_at', g.eligible_at, 'crashes', g.crashes, 'interruptions', g.interruptions)
                   else jsonb_build_object('to_attempt', g.attempt, 'eligible_at', g.eligible_at, 'failed', d.fault is not null,
                                           'proof', case when d.stopped then 'stopped' when d.expired then 'lease' else 'dead' end)
                        || case when g.journal < 3 then '{"folded": {}}'::jsonb
                                when d.expired then jsonb_build_object('renewed_until', greatest(d.lease, 'epoch')) else '{}' end end) end
)
select t.id, t.queue, t.partition_key, t.status, t.fsm, t.step, t.fault, t.cascades from taken t
union all
select n.id, n.queue, n.partition_key, 'runnable', n.fsm, n.undo, null, durable.asked_for_children(n.request) from entered n
