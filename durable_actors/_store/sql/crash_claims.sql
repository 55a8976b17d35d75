-- crash_claims: release claims whose step ended without an outcome (SystemExit and the like); each counts as a crash.
-- params   $1 id bigint[] · $2 claim uuid[] · $3 what was raised text[] · $4 max crashes int or null · $5 its class text ·
--          $6 its traceback text
-- returns  id, queue, partition_key, status (runnable, failed when the step crashed too often, or
--          cancelled if that was requested, or if it compensated), fsm, step, why it failed, whether its children are to be cancelled
-- moves    cancelled · compensating · crashed · unfit
-- locks    FOR NO KEY UPDATE SKIP LOCKED in id order; for a row that ends also its parent, whose barrier join_parents counts
--          next. Never waits. A claim whose row is locked stays ours, and the caller tries it again.
-- index    gen_durable_pkey
-- keeps    I4 a stale write changes nothing. Counters stop at their ends, as in release_claims.
-- backoff  and quarantine: as in reap_claims; tests/store/test_crashes.py compares the two
with mine as materialized (
    select y.id, y.parent_id, y.barrier, y.claim_id as claim, y.locked_by as owner, u.error, octet_length(y.partition_key) > 2000 as wide,
           x.asked or x.over as asked, case when x.asked then y.request ->> 'reason' else x.crashed end as reason,
           case when x.asked then durable.compensation(y.request, y.partition_key) end as undo, y.request, y.partition_key, y.fsm,
           case when x.asked or x.over then null when octet_length(y.partition_key) > 2000
                then format('its partition key has %s bytes, at most 2000 are allowed', octet_length(y.partition_key))
                else x.crashed end as fault
      from unnest($1::bigint[], $2::uuid[], $3::text[]) u(id, claim, error)
      join durable.gen_durable y on y.id = u.id and y.claim_id = u.claim and y.locked_by is not null
     cross join lateral (select case when y.crashes >= $4::int - 1
          then format('quarantined: step %s ended %s without an outcome (the last time: %s)', left(y.step, 255),
                      case when y.crashes = 0 then 'once' else y.crashes + 1::bigint || ' times' end, u.error) end) q(crashed)
     cross join lateral (select q.crashed, durable.asked_to_cancel(y.request) as asked,  -- over: what compensates has crashed too often
                                y.cancellation is not null and q.crashed is not null and octet_length(coalesce(y.partition_key, '')) <= 2000 as over) x
     order by y.id for no key update of y skip locked
), parents as materialized (
    select p.id from durable.gen_durable p
     where p.id = any (array(select m.parent_id from mine m where (m.fault is not null or (m.asked and m.undo is null)) and m.barrier is not null))
       and p.status::text = 'awaiting_children'
     order by p.id for no key update skip locked
), entered as materialized (
    select m.id, durable.compensate(m.id, m.request, m.undo) as queue, m.partition_key, m.fsm, m.undo, m.request from mine m where m.undo is not null
), given_back as (
update durable.gen_durable g
   set status = (case when m.asked then 'cancelled' when m.fault is not null then 'failed' else 'runnable' end)::durable.durable_status,
       hold = case when m.fault is null then durable.hold_of(g.request) else 0 end,
       attempt = case when m.fault is null and not m.asked then least(g.attempt, 2147483646) + 1 else g.attempt end,
       crashes = case when m.asked then g.crashes else least(g.crashes, 2147483646) + 1 end,
       rev = least(g.rev, 9223372036854775806) + 1,
       eligible_at = case when m.asked then g.eligible_at else durable.now() + make_interval(
                         secs => case when g.crashes = 0 then 0 else least(2 ^ least(g.crashes - 1, 9), 300) end) end,
       last_error = case when m.asked then m.reason
                         else coalesce(m.fault, format('crash %s: %s', least(g.crashes, 2147483646) + 1, m.error)) end,
       error_type = case when not m.asked then $5::text end, traceback = case when not m.asked then $6::text end,
       finished_at = case when m.fault is not null or m.asked then durable.now() end,
       children_pending = case when m.asked then 0 else g.children_pending end, wake_on_failure = g.wake_on_failure and not m.asked,
       locked_by = null, lease_expires_at = null, claim_id = null, claim_token_hash = null, updated_at = durable.now()
  from mine m
 where g.id = m.id and m.undo is null
   and ((m.fault is null and not m.asked) or m.barrier is null or m.parent_id = any (array(select p.id from parents p))
        or not exists (select 1 from durable.gen_durable p
                        where p.id = m.parent_id and p.visit = m.barrier and p.status::text = 'awaiting_children'))
returning g.id, g.queue, g.partition_key, g.status::text, g.fsm, g.step, case when m.fault is not null then g.last_error end as fault,
          case when m.asked and durable.asked_for_children(g.request) then durable.cascade(g.id, null, g.request) end as cascades,
          case when m.asked then case when g.journal >= 2 then durable.note_cancelled(
                   g.id, g.rev, g.step, g.visit, g.attempt, g.round, g.request, m.reason) end
               when g.journal >= 1 then durable.note(
              g.id, g.rev, case when m.wide then 'unfit' else 'crashed' end, g.step, null, g.visit, case when m.fault is null then g.attempt - 1 else g.attempt end, g.round,
              m.claim, m.owner,
              failure => jsonb_strip_nulls(jsonb_build_object('type', g.error_type, 'text', g.last_error, 'traceback', g.traceback)),
              further => case when m.wide then jsonb_build_object('eligible_at', g.eligible_at, 'crashes', g.crashes)
                              else jsonb_build_object('to_attempt', g.attempt, 'eligible_at', g.eligible_at, 'failed', m.fault is not null)
                                   || case when g.journal < 3 then '{"folded": {}}'::jsonb else '{}' end end) end
)
select b.id, b.queue, b.partition_key, b.status, b.fsm, b.step, b.fault, b.cascades from given_back b
union all
select n.id, n.queue, n.partition_key, 'runnable', n.fsm, n.undo, null, durable.asked_for_children(n.request) from entered n
