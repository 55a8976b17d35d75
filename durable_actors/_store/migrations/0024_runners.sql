-- Runners of any kind: claim_next, heartbeat, complete and fail, so that a worker needs a Postgres driver and nothing else.
-- docs/reference/runners.md describes them; the other functions are their parts, and no interface.
--
-- First the statements that an engine sends, as functions. Each has the text of its file in _store/sql, which explains it:
-- tests/store/test_runner_functions.py compares them. To change such a file takes a migration that replaces its function.

create function durable.pick_instances(text, int, text, float8, text[], smallint[], timestamptz[], bigint[], bigint[], text, text[], bytea)
returns table (id bigint, priority smallint, eligible_at timestamptz, what text, claim_id uuid, fsm text, fsm_version int, step text,
               attempt int, crashes int, visit bigint, state jsonb, partition_key text, parent_id bigint, awaits text[], inbox boolean,
               children_total int, round int, journal text, cancellation jsonb) language sql volatile as $$
with extra as materialized (
    select g.id, g.priority, g.eligible_at, g.partition_key as k,
       g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
      from durable.gen_durable g
     where g.id = any ($9::bigint[]) and durable.offered(g.status, g.hold) and g.queue = $1::text
       and durable.due(g.eligible_at)
       and not exists (select 1 from unnest($6::smallint[], $7::timestamptz[], $8::bigint[]) b(priority, at, id)
                        where g.priority = b.priority and (g.eligible_at, g.id) > (b.at, b.id))
       for no key update skip locked
), stopped as materialized (
    select array_agg(p.fsm) as machines from durable.pauses p where p.queue = $1::text and durable.lasts(p.until)
), shelf as materialized (
    select c.* from unnest($11::text[]) m(at_step)
     cross join lateral (
        select g.id, g.priority, g.eligible_at, g.partition_key as k,
               g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
          from durable.gen_durable g
         where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text
           and g.fsm = split_part(m.at_step, chr(31), 1) and g.fsm_version = split_part(m.at_step, chr(31), 2)::int
           and coalesce(g.shelved_step, '') = split_part(m.at_step, chr(31), 3)
           and durable.due(g.eligible_at)
         order by g.priority, g.eligible_at, g.id limit $2::int for no key update skip locked) c
     where (select s.machines is null from stopped s) or split_part(m.at_step, chr(31), 1) <> all ((select s.machines from stopped s)::text[])
), win as materialized (
    select w.id, w.priority, w.eligible_at, w.k, w.at_step in (select unnest($5::text[]))
           and ((select s.machines is null from stopped s)
                or split_part(w.at_step, chr(31), 1) <> all ((select s.machines from stopped s)::text[])) as known from (
        select * from extra
        union all
        select * from shelf
        union all
        select head.* from (
            select c.* from unnest($6::smallint[], $7::timestamptz[], $8::bigint[]) p(priority, at, id)
             cross join lateral (
                select g.id, g.priority, g.eligible_at, g.partition_key as k,
                       g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
                  from durable.gen_durable g
                 where durable.offered(g.status, g.hold) and g.queue = $1::text and g.priority = p.priority
                   and durable.due(g.eligible_at) and (g.eligible_at, g.id) > (p.at, p.id)
                 order by g.eligible_at, g.id limit $2::int for no key update skip locked) c
             limit $2::int) head
        order by priority, eligible_at, id limit $2::int) w
     where (select s.machines is null or '' <> all (s.machines) from stopped s)
), judged as materialized (
    select j.* from (
        select array_agg(k order by k, priority, eligible_at, id) filter (where known) ks,
               array_agg(priority order by k, priority, eligible_at, id) filter (where known) ps,
               array_agg(eligible_at order by k, priority, eligible_at, id) filter (where known) es,
               array_agg(id order by k, priority, eligible_at, id) filter (where known) ids,
               coalesce(array_agg(k) filter (where not known), '{}') gone
          from win where k is not null having count(*) > 0) a
     cross join lateral durable.judge_siblings($10::text, $5::text[], a.gone, a.ks, a.ps, a.es, a.ids) j
), shelved as (
    update durable.gen_durable g
       set hold = case when octet_length(g.queue || g.fsm || g.step) > 2600 then 0 else 2 end,
           shelved_step = case when octet_length(g.queue || g.fsm || g.step) > 2600 then g.shelved_step else g.step end,
           status = (case when octet_length(g.queue || g.fsm || g.step) > 2600 then 'failed' else 'runnable' end)::durable.durable_status,
           finished_at = case when octet_length(g.queue || g.fsm || g.step) > 2600 then durable.now() end,
           last_error = case when octet_length(g.queue || g.fsm || g.step) <= 2600 then g.last_error
                             else format('its machine name has %s bytes, its step name %s: too many to wait for a node that has them',
                                         octet_length(g.fsm), octet_length(g.step)) end,
           error_type = case when octet_length(g.queue || g.fsm || g.step) <= 2600 then g.error_type end,
           traceback = case when octet_length(g.queue || g.fsm || g.step) <= 2600 then g.traceback end,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = any (array(select w.id from win w where not w.known))
    returning g.id, g.priority, g.eligible_at,
              case when g.journal >= case when g.status = 'failed' then 1 else 3 end then durable.note(
                  g.id, g.rev, case when g.status = 'failed' then 'unfit' else 'shelved' end, g.step, null, g.visit, g.attempt, g.round,
                  failure => case when g.status = 'failed' then jsonb_build_object('text', g.last_error) end) end
), held as (
    update durable.gen_durable g set hold = 1, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = any ((select j.hold from judged j)::bigint[])
    returning g.id, g.priority, g.eligible_at,
              case when g.journal >= 3 then durable.note(g.id, g.rev, 'held', g.step, null, g.visit, g.attempt, g.round) end
), claimed as (
    update durable.gen_durable g
       set status = 'executing', hold = 0, locked_by = $3::text, rev = least(g.rev, 9223372036854775806) + 1,
           claim_id = ((select left(replace(gen_random_uuid()::text, '-', ''), 16)) || encode(int8send(g.id), 'hex'))::uuid,
           claim_token_hash = $12::bytea,
           lease_expires_at = pg_catalog.now() + make_interval(secs => $4::float8), updated_at = durable.now()
     where g.id = any (array(select w.id from win w where w.known and w.k is null) || coalesce(
               (select j.claim from judged j)::bigint[], (select '{}'::bigint[] from set_config('synchronous_commit', 'off', true))))
    returning g.id, g.priority, g.eligible_at, g.claim_id, g.fsm, g.fsm_version, g.step, g.attempt, g.crashes,
              g.visit, g.state, g.partition_key, g.parent_id, g.awaits, g.inbox, g.children_total, g.round,
              case when g.journal > 0 then g.journal || case when g.journal < 2 then '' else ' ' || coalesce(encode(g.fingerprint, 'hex'), '') end
                  || case when g.journal < 3 then '' else ' ' || g.lease_expires_at end end as journal, g.cancellation,
              case when g.journal >= 3 then durable.note(g.id, g.rev, 'claimed', g.step, null, g.visit, g.attempt, g.round, g.claim_id,
                  g.locked_by, further => jsonb_build_object('lease_until', g.lease_expires_at, 'token_hash', g.claim_token_hash)) end
)
select id, priority, eligible_at, 'c', claim_id, fsm, fsm_version, step, attempt, crashes, visit, state, partition_key,
       parent_id, awaits, inbox, children_total, round, journal, cancellation
  from claimed
union all
select id, priority, eligible_at, what, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null from (
    select id, priority, eligible_at, 'h' as what from held
    union all
    select id, priority, eligible_at, 's' from shelved
    union all
    select id, priority, eligible_at, 'l' from win where known and id = any ((select j.leave from judged j)::bigint[])
    offset 0) others
$$;

create function durable.reap_claims(int, text[], int, float8[], text)
returns table (id bigint, queue text, partition_key text, status text, fsm text, step text, fault text, cascades boolean) language sql volatile as $$
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
$$;

create function durable.expire_awaits(text, int)
returns void language sql volatile as $$
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
$$;

create function durable.renew_leases(bigint[], uuid[], float8)
returns table (claim_id uuid, lease_until timestamptz) language sql volatile as $$
update durable.gen_durable g
   set lease_expires_at = pg_catalog.now() + make_interval(secs => $3::float8)
 where g.id = any (array(
    select y.id from unnest($1::bigint[], $2::uuid[]) u(id, claim)
      join durable.gen_durable y on y.id = u.id and y.claim_id = u.claim and y.locked_by is not null
     order by y.id for no key update of y skip locked))
returning g.claim_id, g.lease_expires_at
$$;

create function durable.commit_parks(bigint[], uuid[], bigint[], text[], text[], text[], text[], int[], int[], float8[], text[], boolean[], text[], text[], boolean[], text[], float8[], text[], text[], boolean, text[])
returns void language sql volatile as $$
update durable.gen_durable g
   set status = o.status::durable.durable_status,
       hold = case when o.status = 'runnable' then durable.hold_of(g.request) else 0 end,
       step = o.step,
       state = coalesce(o.state::jsonb, g.state),
       result = o.result::jsonb,
       attempt = o.attempt,
       visit = g.visit + o.advance,
       rev = least(g.rev, 9223372036854775806) + 1,
       crashes = case when o.advance > 0 then 0 else g.crashes end,
       round = case when o.advance > 0 then 0 else least(g.round, 2147483646) + 1 end,
       eligible_at = durable.now() + make_interval(secs => o.delay),
       last_error = o.last_error,
       error_type = o.error_type,
       traceback = o.traceback,
       partition_key = case when o.rekey then o.new_key else g.partition_key end,
       locked_by = null,
       lease_expires_at = null,
       finished_at = case when o.status in ('done', 'failed', 'cancelled') then durable.now() end,
       awaits = case when o.keeps or o.status in ('failed', 'cancelled') then g.awaits else o.awaits::text[] end,
       await_step = o.await_step,
       manual = case when o.manual is not null then o.manual::jsonb when o.advance = 0 and o.status <> 'done' then g.manual end,
       await_deadline = case when o.timeout is not null then durable.now() + make_interval(secs => o.timeout) end,
       children_total = case when o.advance > 0 then 0 else g.children_total end,  -- the barrier is the visit's
       children_pending = 0,
       wake_on_failure = false,
       updated_at = durable.now()
  from unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::int[], $9::int[],
              $10::float8[], $11::text[], $12::boolean[], $13::text[], $14::text[], $15::boolean[], $16::text[], $17::float8[],
              $18::text[], $19::text[], $21::text[])
       o(id, claim, visit, status, step, state, result, attempt, advance, delay, last_error, rekey, new_key, awaits, keeps,
         await_step, timeout, error_type, traceback, manual)
 where g.id = o.id and g.claim_id = o.claim and g.visit = o.visit and g.locked_by is not null
   and ($20::boolean or g.lease_expires_at > clock_timestamp())
   and (g.request is null or o.status in ('done', 'cancelled') or not durable.asked_to_cancel(g.request))
returning g.id, g.visit, g.status, null, g.inbox,
          case when g.inbox and o.status = 'done' then durable.drop_inbox(g.id) end
$$;

create function durable.park_parent(bigint, text, text, int, int, boolean, float8, text, int, text, int, timestamptz, text, text, boolean)
returns void language sql volatile as $$
update durable.gen_durable g
   set status = (case when $5::int > 0 then 'awaiting_children' else 'runnable' end)::durable.durable_status,
       hold = case when $5::int > 0 then 0 else durable.hold_of(g.request) end,
       step = case when $5::int > 0 then g.step else $2::text end,
       await_step = case when $5::int > 0 then $2::text end,
       await_deadline = case when $5::int > 0 and $7::float8 is not null then durable.now() + make_interval(secs => $7::float8) end,
       state = coalesce($3::text::jsonb, g.state),
       attempt = 0, crashes = 0, round = 0, visit = g.visit + 1, rev = least(g.rev, 9223372036854775806) + 1, eligible_at = durable.now(), last_error = null, error_type = null, traceback = null, awaits = null, manual = null,
       children_total = $4::int, children_pending = $5::int, wake_on_failure = $6::boolean and $5::int > 0,
       cancel_rest = case when $15::boolean and $5::int > 0 then true when g.cancel_rest is not null then false end,
       locked_by = null, lease_expires_at = null, updated_at = durable.now()
 where g.id = $1::bigint
returning g.id, g.visit, g.status,
          case when g.journal >= 2 then durable.note(
              g.id, g.rev, 'spawned', $8::text, $2::text, g.visit - 1, $9::int, $11::int, g.claim_id, $10::text, $13::text::jsonb,
              jsonb_strip_nulls(jsonb_build_object('children_total', $4::int, 'children_pending', $5::int, 'folded', case when g.journal < 3 then '{}'::jsonb end, 'wake_on_failure', g.wake_on_failure,
                                                   'deadline', g.await_deadline, 'renewed_until', $12::timestamptz,
                                                   'late', case when $12::timestamptz <= durable.now() then true end, 'definition', $14::text))
              || case when g.cancel_rest is not null then jsonb_build_object('columns', jsonb_build_object('cancel_rest', g.cancel_rest)) else '{}' end
              || case when g.journal = 4 then jsonb_build_object('state', g.state) else '{}' end) end
$$;

create function durable.insert_instances(text[], int[], text[], text[], text[], smallint[], text[], bytea[], text[], timestamptz[], float8[], bigint[], bigint[], text[], text[], smallint[], text[])
returns table (id bigint, occupant bigint) language sql volatile as $$
with input as materialized (
    select nextval('durable.gen_durable_id_seq') as id, u.* from (
        select * from unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::bytea[],
                             $9::text[], $10::timestamptz[], $11::float8[], $12::bigint[], $13::bigint[], $14::text[], $15::text[],
                             $16::smallint[], $17::text[])
             with ordinality
             i(fsm, version, step, state, queue, priority, partition_key, unique_key, scope, at, delay, parent, barrier, tags, meta, level,
               definition, ord)
         order by ord) u
), inserted as (
    insert into durable.gen_durable (id, fsm, fsm_version, step, state, queue, priority, partition_key, unique_key,
                                     unique_scope, eligible_at, parent_id, barrier, tags, meta, journal, fingerprint)
    overriding system value
    select id, fsm, version, step, state::jsonb, queue, priority, partition_key, unique_key,
           scope::durable.durable_status[], coalesce(at, durable.now() + make_interval(secs => coalesce(delay, 0))), parent, barrier,
           tags::text[], meta::jsonb, level, decode(definition, 'hex')
      from input order by unique_key nulls first, id
    on conflict (unique_guard) where unique_guard is not null do nothing
    returning id
), started as (
    insert into durable.journal (instance_id, rev, visit, attempt, kind, step, to_step, data)
    select i.id, 1, 1, 0, 'started', i.step, i.step,
           jsonb_build_object('row', jsonb_strip_nulls(jsonb_build_object(
               'fsm', i.fsm, 'fsm_version', i.version, 'step', i.step, 'queue', i.queue, 'priority', i.priority, 'journal', i.level,
               'eligible_at', coalesce(i.at, durable.now() + make_interval(secs => coalesce(i.delay, 0))),
               'partition_key', i.partition_key, 'unique_key', chr(92) || 'x' || encode(i.unique_key, 'hex'),  -- whatever bytea_output is
               'unique_scope', i.scope::durable.durable_status[], 'parent_id', i.parent, 'barrier', i.barrier, 'tags', i.tags::text[],
               'inserted_at', durable.now(), 'fingerprint', chr(92) || 'x' || i.definition))
               || case when i.meta is null then '{}' else jsonb_build_object('meta', i.meta::jsonb) end
               || case when i.level < 4 then '{}' else jsonb_build_object('state', i.state::jsonb) end)
           || case when i.parent is null then '{}' else jsonb_build_object('parent', (
               -- The statement's transaction has locked it, and it is still in the step that spawns.
               select jsonb_build_object('id', p.id, 'machine', p.fsm, 'step', p.step) from durable.gen_durable p where p.id = i.parent)) end
      from input i where i.level >= 2 and i.id in (select n.id from inserted n)
)
select case when o.new then o.id end,
       case when not o.new then (
           select g.id from durable.gen_durable g where g.unique_guard = o.unique_key) end
  from (select input.*, input.id in (select i.id from inserted i) as new from input offset 0) o
 order by o.ord
$$;

create function durable.journal_outcomes(bigint[], uuid[], text[], text[], bigint[], int[], float8[], text, int[], timestamptz[], boolean[], text[], text[])
returns void language sql volatile as $$
insert into durable.journal (instance_id, rev, visit, seconds, claim_id, attempt, kind, step, to_step, node, error, data)
select g.id, g.rev, u.visit, u.seconds, g.claim_id, u.attempt, u.kind, u.step,
       case when u.kind = 'next' then g.step when u.kind = 'parked' then g.await_step when u.kind = 'asked' then g.manual ->> 'then' end,
       $8::text,
       case when g.last_error is not null
            then jsonb_strip_nulls(jsonb_build_object('type', g.error_type, 'text', g.last_error, 'traceback', g.traceback))
            else u.handled::jsonb end,
       -- Most records need no more than a constant: to build an object takes as long as to insert it.
       case when g.journal = 2 and u.round = 0 and u.rekeyed is not true and u.definition is null and (u.kind = 'done' or (u.kind = 'next' and g.locked_by is not null) or
                                                    (u.kind = 'next' and g.eligible_at <= g.updated_at))
            then case when g.locked_by is null then '{"folded": {}}'::jsonb else '{"folded": {}, "keeps_claim": true}' end
            else jsonb_strip_nulls(jsonb_build_object(
                     'folded', case when g.journal < 3 then '{}'::jsonb end,
                     'definition', u.definition,
                     'round', nullif(u.round, 0),
                     'renewed_until', u.lease,
                     'late', case when u.lease <= durable.now() then true end,
                     'keeps_claim', case when g.locked_by is not null then true end,
                     'lease_until', g.lease_expires_at,
                     'eligible_at', case when u.kind = 'retry' or (u.kind = 'next' and g.eligible_at > g.updated_at) then g.eligible_at end,
                     'awaits', case when u.kind = 'parked' then to_jsonb(g.awaits) end,
                     'deadline', g.await_deadline,
                     'to_attempt', case when u.kind = 'failed' and g.attempt <> u.attempt then g.attempt end))
                 || case when u.kind = 'asked' then jsonb_build_object('boundary', g.manual) else '{}' end
                 || case when u.rekeyed then jsonb_build_object('columns', jsonb_build_object('partition_key', g.partition_key)) else '{}' end
                 || case when g.journal < 4 then '{}'
                         when g.finished_at is null then jsonb_build_object('state', g.state)
                         when u.kind = 'done' then jsonb_build_object('result', g.result)
                         else '{}' end
       end
  from (select i.id, i.claim, coalesce(i.kind, ($3::text[])[1]) as kind, coalesce(i.step, ($4::text[])[1]) as step,
               coalesce(i.visit, ($5::bigint[])[1]) as visit, coalesce(i.attempt, ($6::int[])[1]) as attempt, i.seconds,
               coalesce(i.round, ($9::int[])[1]) as round, i.lease, i.rekeyed, i.handled, i.definition
          from unnest($1::bigint[], $2::uuid[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::float8[], $9::int[], $10::timestamptz[],
                      $11::boolean[], $12::text[], $13::text[])
               i(id, claim, kind, step, visit, attempt, seconds, round, lease, rekeyed, handled, definition)) u
  join durable.gen_durable g on g.id = u.id and g.claim_id = u.claim
 where g.xmin = pg_current_xact_id()::xid
   -- A record of this rev exists only if a hand has changed the row's; verify reports it. "on conflict" would insert speculatively.
   and (select true from durable.journal j where j.instance_id = g.id and j.rev = g.rev) is null
$$;

create function durable.consume_signals(bigint[], bigint[])
returns void language sql volatile as $$
with ours as materialized (
    select p.target, p.signal
      from unnest($1::bigint[], $2::bigint[]) p(target, signal)
      join durable.gen_durable g on g.id = p.target
     where g.xmin = pg_current_xact_id()::xid
), marked as (
    update durable.signals s set consumed_at = durable.now()
      from ours o
     where s.id = o.signal and s.target_id = o.target and s.consumed_at is null and s.dedup_key is not null
)
delete from durable.signals s
 using ours o
 where s.id = o.signal and s.target_id = o.target and s.dedup_key is null
$$;

create function durable.recheck_awaits(bigint[], bigint[])
returns void language sql volatile as $$
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
$$;

create function durable.join_parents(bigint[])
returns void language sql volatile as $$
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
$$;

create function durable.promote_siblings(text[])
returns void language sql volatile as $$
update durable.gen_durable g set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
 where g.id = any (array(
    select h.id from unnest($1::text[]) u(key)
     cross join lateral (
        select y.id from durable.gen_durable y
         where y.partition_key = u.key and y.status = 'runnable' and y.hold = 1
           and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
           and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
         order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h))
returning g.id, g.queue, g.priority, g.eligible_at,
          case when g.journal >= 3 then durable.note(g.id, g.rev, 'offered', g.step, null, g.visit, g.attempt, g.round) end
$$;

create function durable.sweep_keys(text, int)
returns table (key text, stuck boolean) language sql volatile as $$
with recursive k(key) as (
    (select y.partition_key from durable.gen_durable y
      where y.status = 'runnable' and y.hold = 1 and y.partition_key > $1::text order by y.partition_key limit 1)
    union all
    select (select y.partition_key from durable.gen_durable y
             where y.status = 'runnable' and y.hold = 1 and y.partition_key > k.key order by y.partition_key limit 1)
      from k where k.key is not null
)
select null::text, true
 where $1::text = ''
   and (exists (select 1 from durable.gen_durable y where y.status = 'runnable' and y.hold = 1 and y.partition_key is null)
        or exists (select 1 from durable.gen_durable y where y.status = 'runnable' and y.hold = 1 and y.partition_key = ''))
union all
select k.key,
       not exists (select 1 from durable.gen_durable y where y.partition_key = k.key and y.status = 'executing')
       -- Not "no row is offered": that would read all 50,000 held rows of a busy key. One that is offered behind the first
       -- makes this an extra promotion, which is safe. Shelved, paused and waiting rows have given up their place.
       and coalesce((select y.hold from durable.gen_durable y
                      where y.partition_key = k.key and y.status = 'runnable' and durable.due(y.eligible_at) and y.hold <> 2
                        and durable.keeps_place(y.hold)
                        and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                        and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                      order by y.priority, y.eligible_at, y.id limit 1) = 1, false)
  from (select key from k limit $2::int) k where k.key is not null
$$;


-- Seconds of a lease. Postgres owns the clock; what is longer than any engine's lease is a mistake.
create function durable.lease_seconds(lease interval) returns float8 language plpgsql immutable as $$
begin
    if lease is null or lease <= interval '0' or lease > interval '3650 days' then
        raise exception 'the lease must be longer than 0, and at most 10 years; it is %', coalesce(lease::text, 'null')
            using errcode = 'RD004';
    end if;
    return extract(epoch from lease);
end $$;

-- A call reads what others have committed meanwhile, and rows of its own transaction are recognised by their xmin: so no older
-- snapshot, and no savepoint.
create function durable.check_isolation() returns void language plpgsql stable as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'runners need transactions that are "read committed", this one is "%"', current_setting('transaction_isolation')
            using errcode = 'invalid_transaction_state';
    end if;
end $$;

create function durable.check_written(instance bigint) returns void language plpgsql volatile as $$
begin
    if not exists (select 1 from durable.gen_durable g where g.id = instance and g.xmin = pg_current_xact_id()::xid) then
        raise exception 'runners must not be called inside a savepoint' using errcode = 'invalid_transaction_state';
    end if;
end $$;

-- Names, keys and durations of an outcome, checked as the Python classes check theirs.
create function durable.outcome_name(outcome jsonb, field text) returns text language plpgsql immutable as $$
begin
    if jsonb_typeof(outcome -> field) is distinct from 'string' or length(outcome ->> field) not between 1 and 255
       or position(chr(31) in outcome ->> field) > 0 then
        raise exception '"%" must be a name of 1 to 255 characters: %', field, left(coalesce((outcome -> field)::text, 'missing'), 200)
            using errcode = 'RD004';
    end if;
    return outcome ->> field;
end $$;

create function durable.outcome_seconds(outcome jsonb, field text) returns float8 language plpgsql immutable as $$
begin
    if coalesce(jsonb_typeof(outcome -> field), 'null') = 'null' then return null; end if;
    if jsonb_typeof(outcome -> field) <> 'number' or (outcome ->> field)::numeric not between 0 and 3155760000 then
        raise exception '"%" must be seconds, from 0 to 100 years: %', field, left((outcome -> field)::text, 200) using errcode = 'RD004';
    end if;
    return (outcome ->> field)::float8;
end $$;

-- What an outcome is: one of eight. Raises for anything else.
create function durable.outcome_kind(outcome jsonb) returns text language plpgsql immutable as $$
declare
    kind text;
    odd text;
begin
    if jsonb_typeof(outcome) is distinct from 'object'
       or (select count(*) from jsonb_object_keys(outcome) k where k in ('next', 'retry', 'await', 'children', 'pause', 'approval', 'done', 'stop')) <> 1 then
        raise exception 'an outcome is an object with one of next, retry, await, children, pause, approval, done, stop: %', left(coalesce(outcome::text, 'null'), 200)
            using errcode = 'RD004';
    end if;
    select k into kind from jsonb_object_keys(outcome) k where k in ('next', 'retry', 'await', 'children', 'pause', 'approval', 'done', 'stop');
    select k into odd from jsonb_object_keys(outcome) k
     where k <> all (case kind when 'next' then '{next,state,partition_key,consume}' when 'retry' then '{retry,state}'
                               when 'await' then '{await,then,state,timeout,consume}' when 'children' then '{children,then,state,join,timeout,rest}'
                               when 'pause' then '{pause,state,title,data}' when 'approval' then '{approval,state,on_reject,title,data,timeout,on_timeout}'
                               when 'done' then '{done}' else '{stop}' end::text[]) limit 1;
    if odd is not null then
        raise exception 'an outcome "%" has no field "%"', kind, odd using errcode = 'RD004';
    end if;
    return kind;
end $$;

-- The boundary of a pause or an approval, as the column "manual" has it.
create function durable.outcome_boundary(outcome jsonb, what text) returns jsonb language plpgsql immutable as $$
declare
    told jsonb := jsonb_build_object('kind', what, 'then', outcome ->> what) || coalesce((
        select jsonb_object_agg(k, outcome -> k) from unnest('{title,data,on_reject,on_timeout}'::text[]) k where outcome -> k <> 'null'), '{}');
begin
    if jsonb_typeof(coalesce(told -> 'title', '""')) <> 'string' or length(told ->> 'title') not between 1 and 2000 then
        raise exception '"title" must be a text of 1 to 2000 characters' using errcode = 'RD004';
    end if;
    perform case when told ? 'on_reject' then durable.outcome_name(outcome, 'on_reject') end,
            case when told ? 'on_timeout' then durable.outcome_name(outcome, 'on_timeout') end;
    if told ? 'on_timeout' and durable.outcome_seconds(outcome, 'timeout') is null then
        raise exception '"on_timeout" needs "timeout"' using errcode = 'RD004';
    end if;
    if octet_length(told::text) > 65536 then
        raise exception 'a boundary has at most 65536 bytes of JSON, this one has %', octet_length(told::text) using errcode = 'RD004';
    end if;
    return told;
end $$;

-- Whether this runner still owns its claim. Locks the row and returns it; without locked_by if the claim's outcome is committed
-- already: a commit keeps the claim's id until the next claim, and the journal for longer. Raises in every other case.
create function durable.own_claim(instance bigint, claim uuid, token text, late boolean) returns durable.gen_durable
language plpgsql volatile as $$
declare
    r durable.gen_durable;
    mine boolean;
begin
    perform durable.check_isolation();
    select g.* into r from durable.gen_durable g where g.id = instance for no key update;
    if not found then
        raise exception 'there is no instance %', coalesce(instance::text, 'null') using errcode = 'RD005';
    end if;
    mine := coalesce(r.claim_id = claim and r.claim_token_hash = sha256(convert_to(split_part(token, ':', 1), 'UTF8'))
                     and token ~ '^[0-9a-f]{64}(:[0-9,]*){0,2}$', false);
    if mine and r.locked_by is not null then
        if late or r.lease_expires_at > clock_timestamp() then return r; end if;
        raise exception 'instance %: the lease of this claim has expired, and late outcomes are not accepted', instance using errcode = 'RD002';
    end if;
    if not mine and (r.claim_id is not distinct from claim or not exists (
        select 1 from durable.journal j
         where j.instance_id = instance and j.rev > r.rev - 1000 and j.claim_id = claim
           and j.kind in ('next', 'retry', 'parked', 'asked', 'spawned', 'done', 'failed', 'cancelled'))) then
        raise exception 'instance %: this claim is not current; nothing was written', instance
            using errcode = 'RD001', detail = format('The instance is %s.', r.status),
                  hint = 'Its lease has expired and the claim was taken back, or id, claim_id and token do not belong together.';
    end if;
    r.locked_by := null;
    return r;
end $$;

-- Seconds since the row was claimed, by the record of that: the row does not have the time.
create function durable.claim_age(r durable.gen_durable) returns float8 language sql stable as $$
    select greatest(extract(epoch from durable.now() - j.at), 0)::float8
      from durable.journal j
     where j.instance_id = r.id and j.rev > r.rev - 1000 and j.claim_id = r.claim_id and j.kind = 'claimed'
     order by j.rev desc limit 1
$$;

-- The commit of an outcome, but for children: what an engine's flusher sends, in its order.
create function durable.commit_claim(
    r durable.gen_durable, late boolean, kind text, to_status text, to_step text, new_state text, new_result text, to_attempt int,
    advance int, delay float8, error jsonb, rekey boolean, new_key text, names text[], keeps boolean, then_step text, timeout float8,
    consumed bigint[], kept bigint[], boundary jsonb default null
) returns void language plpgsql volatile as $$
begin
    if r.cancellation is not null and to_status in ('done', 'failed') then  -- it compensated: however that ends, it was cancelled
        kind := 'cancelled';
        to_status := 'cancelled';
        new_result := null;
        error := coalesce(error, jsonb_build_object('text', r.cancellation ->> 'reason'));
    end if;
    perform durable.commit_parks(
        array[r.id], array[r.claim_id], array[r.visit], array[to_status], array[to_step], array[new_state], array[new_result],
        array[to_attempt], array[advance], array[delay], array[error ->> 'text'], array[rekey], array[new_key], array[names::text],
        array[keeps], array[then_step], array[timeout], array[error ->> 'type'], array[error ->> 'traceback'], late, array[boundary::text]);
    perform durable.check_written(r.id);
    if r.journal >= 2 or (r.journal = 1 and kind in ('retry', 'failed')) then
        perform durable.journal_outcomes(
            array[r.id], array[r.claim_id], array[kind], array[r.step], array[r.visit], array[r.attempt],
            case when r.journal < 3 then '{}' else array[durable.claim_age(r)] end, r.locked_by,
            array[r.round], array[case when r.journal >= 3 then r.lease_expires_at end], array[rekey], '{}', '{}');
    end if;
    if consumed <> '{}' then
        perform durable.consume_signals(array_fill(r.id, array[cardinality(consumed)]), consumed);
    end if;
    if to_status = 'awaiting_signal' and boundary is null then
        perform durable.recheck_awaits(array[r.id], kept);
    end if;
    if r.parent_id is not null and to_status in ('done', 'failed', 'cancelled') then
        perform durable.join_parents(array[r.id]);
    end if;
    if r.partition_key is not null then
        perform durable.promote_siblings(array[r.partition_key]);
    end if;
end $$;

-- Its runner was asked to cancel it, and the step is not done: whatever it returned, the instance ends, or enters the step that compensates.
create function durable.cancel_claim(r durable.gen_durable, late boolean) returns void language plpgsql volatile as $$
declare
    undo text := durable.compensation(r.request, r.partition_key);
begin
    if undo is not null then
        perform durable.compensate(r.id, r.request, undo);
        if r.partition_key is not null then
            perform durable.promote_siblings(array[r.partition_key]);
        end if;
        return;
    end if;
    perform durable.commit_claim(
        r, late, 'cancelled', 'cancelled', r.step, null, null, r.attempt, 0, 0, jsonb_build_object('text', r.request ->> 'reason'),
        false, null, null, false, null, null, '{}', '{}');
    if durable.asked_for_children(r.request) then
        perform durable.cascade(r.id, null, r.request);
    end if;
end $$;

-- The commit of children: the row is locked already.
create function durable.spawn_from_claim(r durable.gen_durable, outcome jsonb, consumed bigint[]) returns void language plpgsql volatile as $$
declare
    children jsonb := outcome -> 'children';
    wanted jsonb := coalesce(outcome -> 'join', '"all"');
    odd text;
    inserted int := 0;
    added int;
    needed int;
begin
    if jsonb_typeof(children) <> 'array' or exists (select 1 from jsonb_array_elements(children) c where jsonb_typeof(c) <> 'object') then
        raise exception '"children" must be a list of objects' using errcode = 'RD004';
    end if;
    if wanted not in ('"all"', '"any_failed"') and (jsonb_typeof(wanted) <> 'number' or wanted::text !~ '^[1-9][0-9]{0,8}$') then
        raise exception '"join" must be "all", "any_failed" or a number of children: %', left(wanted::text, 200) using errcode = 'RD004';
    end if;
    if coalesce(outcome -> 'rest', '"leave"') not in ('"leave"', '"cancel"') then
        raise exception '"rest" must be "leave" or "cancel": %', left((outcome -> 'rest')::text, 200) using errcode = 'RD004';
    end if;
    select k into odd from jsonb_array_elements(children) c, jsonb_object_keys(c) k
     where k not in ('machine', 'version', 'step', 'state', 'queue', 'priority', 'partition_key', 'unique_key', 'unique_key_hex',
                     'unique_scope', 'eligible_at', 'schedule_in', 'tags', 'meta', 'journal', 'fingerprint') limit 1;
    if odd is not null then
        raise exception 'a child has no field "%"', odd using errcode = 'RD004';
    end if;
    perform durable.outcome_name(c, 'machine'), case when c ? 'step' then durable.outcome_name(c, 'step') end,
            case when c ? 'queue' then durable.outcome_name(c, 'queue') end, durable.outcome_seconds(c, 'schedule_in')
       from jsonb_array_elements(children) c;
    for part in 0 .. jsonb_array_length(children) / 5000 loop  -- as an engine: a statement is not too long
        select count(n.id) into added from (
            select array_agg(c.machine) as a1, array_agg(coalesce(c.version, 1)) as a2, array_agg(coalesce(c.step, 'start')) as a3,
                   array_agg(coalesce(c.state, '{}')::text) as a4, array_agg(coalesce(c.queue, 'default')) as a5,
                   array_agg(coalesce(c.priority, 0)::smallint) as a6, array_agg(c.partition_key) as a7, array_agg(k.key) as a8,
                   array_agg(case when k.key is null then '{}'
                                  else coalesce(c.unique_scope::text, '{runnable,executing,awaiting_signal,awaiting_children}') end) as a9,
                   array_agg(c.eligible_at) as a10, array_agg(c.schedule_in) as a11, array_agg(r.id) as a12, array_agg(r.visit + 1) as a13,
                   array_agg(c.tags::text) as a14, array_agg(c.meta::text) as a15,
                   array_agg(case coalesce(c.journal, r.journal::text) when 'off' then 0 when 'auto' then 2 when 'outcomes' then 2
                                  when 'claims' then 3 when 'full' then 4 else coalesce(c.journal, r.journal::text)::int end::smallint) as a16,
                   array_agg(c.fingerprint) as a17
              from rows from (jsonb_to_recordset(children) as (
                       machine text, version int, step text, state jsonb, queue text, priority int, partition_key text, unique_key text,
                       unique_key_hex text, unique_scope text[], eligible_at timestamptz, schedule_in float8, tags text[], meta jsonb,
                       journal text, fingerprint text)) with ordinality c
             cross join lateral (select coalesce(convert_to(c.unique_key, 'UTF8'), decode(c.unique_key_hex, 'hex')) as key) k
             where c.ordinality > part * 5000 and c.ordinality <= (part + 1) * 5000) i
         cross join lateral durable.insert_instances(i.a1, i.a2, i.a3, i.a4, i.a5, i.a6, i.a7, i.a8, i.a9, i.a10, i.a11, i.a12, i.a13,
                                                     i.a14, i.a15, i.a16, i.a17) n
         where i.a1 is not null;
        inserted := inserted + added;
    end loop;
    needed := case when jsonb_typeof(wanted) = 'number' then least(wanted::text::int, inserted) else inserted end;
    perform durable.park_parent(
        r.id, durable.outcome_name(outcome, 'then'), (outcome -> 'state')::text, inserted, needed, wanted = '"any_failed"',
        durable.outcome_seconds(outcome, 'timeout'), r.step, r.attempt, r.locked_by, r.round,
        case when r.journal >= 3 then r.lease_expires_at end, null, null, coalesce(outcome ->> 'rest', '') = 'cancel');
    perform durable.check_written(r.id);
    if consumed <> '{}' then
        perform durable.consume_signals(array_fill(r.id, array[cardinality(consumed)]), consumed);
    end if;
    if r.partition_key is not null then
        perform durable.promote_siblings(array[r.partition_key]);
    end if;
end $$;

-- Whether the outcome that this claim has committed is another one than this, as far as the journal tells. The row tells the rest,
-- while it is as that outcome left it.
create function durable.conflicts(r durable.gen_durable, claim uuid, kind text, to_step text, state jsonb, result jsonb) returns boolean
language sql stable as $$
select coalesce((
    select j.kind <> conflicts.kind or j.to_step is distinct from conflicts.to_step
           or conflicts.state <> coalesce(j.data -> 'state', case when j.rev = r.rev then r.state end, conflicts.state)
           or conflicts.result <> coalesce(j.data -> 'result', r.result, conflicts.result)
      from durable.journal j
     where j.instance_id = r.id and j.rev > r.rev - 1000 and j.claim_id = claim
       and j.kind in ('next', 'retry', 'parked', 'asked', 'spawned', 'done', 'failed', 'cancelled')
     order by j.rev desc limit 1), false)
$$;

create function durable.complete(id bigint, claim_id uuid, token text, outcome jsonb, late boolean default true)
returns table (verdict text, status text, step text, visit bigint, attempt int, eligible_at timestamptz)
language plpgsql volatile
set jit = off set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    what text := durable.outcome_kind(outcome);
    kind text := case what when 'await' then 'parked' when 'children' then 'spawned' when 'stop' then 'failed' when 'pause' then 'asked'
                           when 'approval' then 'asked' else what end;
    to_step text := case when what in ('next', 'pause', 'approval') then durable.outcome_name(outcome, what)
                         when what = 'children' then durable.outcome_name(outcome, 'then')
                         when what = 'await' then case when outcome ? 'then' and outcome -> 'then' <> 'null' then durable.outcome_name(outcome, 'then') end end;
    boundary jsonb := case when what in ('pause', 'approval') then durable.outcome_boundary(outcome, what) end;
    names text[];
    reason jsonb;
    key text := outcome ->> 'partition_key';
    handed bigint[];
    unseen bigint[];
    kept bigint[];
    named bigint[];
    r durable.gen_durable;
begin
    if jsonb_typeof(coalesce(outcome -> 'consume', '[]')) <> 'array' or octet_length(key) not between 1 and 2000 then
        raise exception '"consume" must be a list of signal ids, "partition_key" a text of 1 to 2000 bytes or null' using errcode = 'RD004';
    end if;
    named := array(select c::text::bigint from jsonb_array_elements(coalesce(outcome -> 'consume', '[]')) c);
    if what = 'await' then
        names := array(select distinct n from jsonb_array_elements_text(case when jsonb_typeof(outcome -> 'await') = 'array' then outcome -> 'await'
                                                                             else jsonb_build_array(outcome -> 'await') end) n);
        if names = '{}' or exists (select 1 from unnest(names) n where n is null or length(n) not between 1 and 255) then
            raise exception '"await" must be the name of a signal or a list of names: %', left((outcome -> 'await')::text, 200) using errcode = 'RD004';
        end if;
    elsif what = 'stop' then
        reason := durable.error_of(outcome -> 'stop');
    end if;
    r := durable.own_claim(complete.id, complete.claim_id, token, late);
    if r.locked_by is null then
        if r.cancellation is not null and what in ('done', 'stop') then
            kind := 'cancelled';
        end if;
        if durable.conflicts(r, complete.claim_id, kind, to_step, outcome -> 'state', outcome -> 'done') then
            raise exception 'instance %: this claim was completed with another outcome; nothing was written', complete.id using errcode = 'RD003';
        end if;
        return query select 'already_completed', r.status::text, r.step, r.visit, r.attempt, r.eligible_at;
        return;
    end if;
    if what <> 'done' and durable.asked_to_cancel(r.request) then
        perform durable.cancel_claim(r, late);
        return query select 'committed', g.status::text, g.step, g.visit, g.attempt, g.eligible_at from durable.gen_durable g where g.id = complete.id;
        return;
    end if;
    handed := string_to_array(split_part(token, ':', 2), ',')::bigint[];
    unseen := string_to_array(split_part(token, ':', 3), ',')::bigint[];
    kept := array(select s.id from durable.signals s where s.target_id = r.id and s.id = any (handed) and s.name = any (names) and s.id <> all (named));
    -- Those that were handed and are not awaited again, and those that are named.
    named := array(select distinct n from unnest(handed || named) n where n <> all (kept));
    case what
    when 'children' then
        perform durable.spawn_from_claim(r, outcome, named);
    when 'next' then
        perform durable.commit_claim(
            r, late, kind, 'runnable', to_step, (outcome -> 'state')::text, null, 0, 1, 0, null,
            outcome ? 'partition_key' and key is distinct from r.partition_key, key, null, false, null, null, named, '{}');
    when 'retry' then
        perform durable.commit_claim(
            r, late, kind, 'runnable', r.step, (outcome -> 'state')::text, null, least(r.attempt, 2147483646) + 1, 0,
            coalesce(durable.outcome_seconds(outcome, 'retry'), 0), null, false, null, null, true, null, null, '{}', '{}');
    when 'await' then
        perform durable.commit_claim(
            r, late, kind, 'awaiting_signal', r.step, (outcome -> 'state')::text, null, case when to_step is null then r.attempt else 0 end,
            case when to_step is null then 0 else 1 end, 0, null, false, null, names, false, to_step,
            durable.outcome_seconds(outcome, 'timeout'), named,
            -- If all that was handed is kept, the next run would be handed the same: what lies beyond must not wake it.
            case when cardinality(kept) < cardinality(handed) then kept else kept || unseen end);
    when 'pause', 'approval' then
        perform durable.commit_claim(
            r, late, kind, 'awaiting_signal', r.step, (outcome -> 'state')::text, null, 0, 1, 0, null, false, null, '{}', false,
            coalesce(boundary ->> 'on_timeout', boundary ->> 'on_reject'), durable.outcome_seconds(outcome, 'timeout'), named, '{}', boundary);
    when 'done' then
        perform durable.commit_claim(
            r, late, kind, 'done', r.step, null, (outcome -> 'done')::text, r.attempt, 0, 0, null, false, null, null, false, null, null, '{}', '{}');
    when 'stop' then
        perform durable.commit_claim(
            r, late, kind, 'failed', r.step, null, null, r.attempt, 0, 0, reason, false, null, null, false, null, null, '{}', '{}');
    end case;
    return query select 'committed', g.status::text, g.step, g.visit, g.attempt, g.eligible_at from durable.gen_durable g where g.id = complete.id;
end $$;

-- An error as rows and records have it: text, and if there was an exception its type and traceback.
create function durable.error_of(error jsonb) returns jsonb language plpgsql immutable as $$
declare
    told text := coalesce(case jsonb_typeof(error) when 'object' then coalesce(error ->> 'text', error ->> 'message', error ->> 'type')
                                                   when 'string' then error #>> '{}' else nullif(error::text, 'null') end, 'no reason was given');
begin
    return jsonb_build_object('text', left(told, 10000), 'type', left(error ->> 'type', 255),
        'traceback', case when length(error ->> 'traceback') > 16000
                          then left(error ->> 'traceback', 8000) || E'\n…\n' || right(error ->> 'traceback', 8000) else error ->> 'traceback' end);
end $$;

-- As a job that raises: again after a while, or failed when its attempts are used up.
create function durable.fail(id bigint, claim_id uuid, token text, error jsonb, retry_in interval default null, max_attempts int default 20,
                             late boolean default true)
returns table (verdict text, status text, step text, visit bigint, attempt int, eligible_at timestamptz)
language plpgsql volatile
set jit = off set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    r durable.gen_durable;
    delay float8 := extract(epoch from retry_in);
begin
    if delay < 0 or delay > 3155760000 then
        raise exception 'retry_in must be between 0 and 100 years; it is %', retry_in using errcode = 'RD004';
    end if;
    r := durable.own_claim(fail.id, fail.claim_id, token, late);
    if r.locked_by is null then
        if durable.conflicts(r, fail.claim_id, 'retry', null, null, null) and durable.conflicts(
               r, fail.claim_id, case when r.cancellation is null then 'failed' else 'cancelled' end, null, null, null) then
            raise exception 'instance %: this claim was completed, and did not fail; nothing was written', fail.id using errcode = 'RD003';
        end if;
        return query select 'already_completed', r.status::text, r.step, r.visit, r.attempt, r.eligible_at;
        return;
    end if;
    if durable.asked_to_cancel(r.request) then
        perform durable.cancel_claim(r, late);
    elsif r.attempt + 1 >= max_attempts then
        perform durable.commit_claim(r, late, 'failed', 'failed', r.step, null, null, r.attempt, 0, 0, durable.error_of(error),
                                     false, null, null, false, null, null, '{}', '{}');
    else
        perform durable.commit_claim(
            r, late, 'retry', 'runnable', r.step, null, null, least(r.attempt, 2147483646) + 1, 0,
            coalesce(delay, least(2 ^ least(r.attempt, 9), 300) * (0.5 + 0.5 * random())), durable.error_of(error),
            false, null, null, true, null, null, '{}', '{}');
    end if;
    return query select 'committed', g.status::text, g.step, g.visit, g.attempt, g.eligible_at from durable.gen_durable g where g.id = fail.id;
end $$;

-- Never waits: of a row that somebody has locked it tells the old end of the lease.
create function durable.heartbeat(id bigint, claim_id uuid, token text, lease interval default '5 minutes')
returns table (lease_until timestamptz, request jsonb)
language plpgsql volatile
set jit = off set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off as $$
#variable_conflict use_column
declare
    seconds float8 := durable.lease_seconds(lease);
    r durable.gen_durable;
begin
    for again in 1 .. 2 loop
        select g.* into r from durable.gen_durable g
         where g.id = heartbeat.id and g.claim_id = heartbeat.claim_id and g.locked_by is not null
           and g.claim_token_hash = sha256(convert_to(split_part(token, ':', 1), 'UTF8'));
        if not found then
            raise exception 'instance %: this claim is not current', coalesce(heartbeat.id::text, 'null')
                using errcode = 'RD001', hint = 'Stop the step, and do not complete it: somebody else runs it, or it is over.';
        end if;
        if again = 1 then
            return query select n.lease_until, r.request from durable.renew_leases(array[heartbeat.id], array[heartbeat.claim_id], seconds) n;
            if found then return; end if;
        end if;
    end loop;
    return query select r.lease_expires_at, r.request;
end $$;

-- Claims one due row of the queue that stands at one of these steps.
--
-- Rows at other steps are read over, not shelved: an engine of the queue runs them. Only if the first 10,000 due rows are all
-- others', 1,000 of them are shelved, so that no call reads them all.
-- A row with a partition key is claimed in a subtransaction. An engine's keeper may hold the key's session lock although no row of the
-- key is executing (its step still runs, its claim was taken back): then the claim is undone, and the row stays as it was.
-- A claim must not be lost in a crash of the server that the runner does not notice, so the pick's own setting of
-- synchronous_commit ends with this function.
create function durable.claim_next(queue text, steps text[], owner text, lease interval default '5 minutes')
returns table (id bigint, claim_id uuid, token text, lease_until timestamptz, machine text, version int, step text, state jsonb,
               attempt int, visit bigint, idempotency_key text, partition_key text, parent_id bigint, awaited jsonb, signals jsonb,
               more_signals boolean, children jsonb, children_counts jsonb, decision jsonb, cancellation jsonb)
language plpgsql volatile
set jit = off set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set synchronous_commit = on as $$
#variable_conflict use_column
declare
    space text := (select n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = 'durable.gen_durable'::regclass);
    seconds float8 := durable.lease_seconds(lease);
    known text[] := array(select m[1] || chr(31) || coalesce(m[2], '1')::int || chr(31) || m[3]
                            from unnest(steps) s, regexp_matches(s, '^(.+?)(?:@(\d{1,9}))?/([^/]+)$') m);
    secret text := encode(sha256(convert_to(gen_random_uuid()::text || gen_random_uuid() || gen_random_uuid(), 'UTF8')), 'hex');
    found_ids bigint[];
    found_keys text[];
    found_shelves text[];
    mine bigint[];
    tried bigint[] := '{}';
    look int := 100;
    seen bigint;
    freed text[];
    ended bigint[];
    shelved boolean := false;
    swept boolean := false;
    got bigint;
    key text;
begin
    perform durable.check_isolation();
    if queue is null or cardinality(known) is distinct from cardinality(steps) or known = '{}' or length(owner) not between 1 and 255
       or owner is null then
        raise exception 'claim_next needs a queue, steps ("machine/step" or "machine@version/step"), and an owner of 1 to 255 characters'
            using errcode = 'RD004';
    end if;
    select array_agg(distinct t.partition_key) filter (where t.partition_key is not null), array_agg(t.id) filter (where t.status in ('failed', 'cancelled'))
      into freed, ended from durable.reap_claims(20, '{}', null, '{}', space) t;
    if freed is not null then perform durable.promote_siblings(freed); end if;
    if ended is not null then
        perform durable.check_written(ended[1]), durable.join_parents(ended);
    end if;
    perform durable.expire_awaits(claim_next.queue, 100);
    -- The pick decides it, in its own snapshot. This saves the search for rows that it would not take.
    known := array(select k from unnest(known) k where not exists (
        select 1 from durable.pauses p
         where p.queue = claim_next.queue and p.fsm in ('', split_part(k, chr(31), 1)) and durable.lasts(p.until)));
    if known = '{}' then return; end if;
    loop
        with recursive p(priority) as (
            (select g.priority from durable.gen_durable g
              where durable.offered(g.status, g.hold) and g.queue = claim_next.queue order by g.priority limit 1)
            union all
            select (select g.priority from durable.gen_durable g
                     where durable.offered(g.status, g.hold) and g.queue = claim_next.queue and g.priority > p.priority
                     order by g.priority limit 1)
              from p where p.priority is not null
        ), head as materialized (
            select h.* from p cross join lateral (
                select g.id, g.priority, g.eligible_at, g.partition_key, g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
                  from durable.gen_durable g
                 where durable.offered(g.status, g.hold) and g.queue = claim_next.queue and g.priority = p.priority
                   and durable.due(g.eligible_at)
                 order by g.eligible_at, g.id limit look) h
             where p.priority is not null limit look
        ), shelf as materialized (
            select s.* from unnest(known) m(at_step) cross join lateral (
                select g.id, g.priority, g.eligible_at, m.at_step from durable.gen_durable g
                 where g.status = 'runnable' and g.hold = 2 and g.queue = claim_next.queue
                   and g.fsm = split_part(m.at_step, chr(31), 1) and g.fsm_version = split_part(m.at_step, chr(31), 2)::int
                   and coalesce(g.shelved_step, '') = split_part(m.at_step, chr(31), 3) and durable.due(g.eligible_at)
                 order by g.priority, g.eligible_at, g.id limit 1) s
        )
        select array_agg(f.id), array_agg(f.partition_key), array_agg(f.shelf), (select count(*) from head)
          into found_ids, found_keys, found_shelves, seen
          from (select w.* from (select h.id, h.priority, h.eligible_at, h.partition_key, null::text as shelf from head h where h.at_step = any (known)
                                 union all
                                 select s.id, s.priority, s.eligible_at, null, s.at_step from shelf s) w
                 where w.id <> all (tried)
                 order by w.priority, w.eligible_at, w.id limit greatest(look / 10, 100)) f;
        for i in 1 .. coalesce(cardinality(found_ids), 0) loop
            continue when found_ids[i] = any (tried);
            -- The rows of a key together: one of them may be claimed, the others are held behind it.
            mine := case when found_keys[i] is null then array[found_ids[i]]
                         else array(select u.id from unnest(found_ids, found_keys) u(id, key) where u.key = found_keys[i]) end;
            tried := tried || mine;
            begin
                select n.id, n.partition_key into got, key from durable.pick_instances(
                    claim_next.queue, cardinality(mine), 'runner:' || owner, seconds, known, '{}', '{}', '{}',
                    case when found_shelves[i] is null then mine else '{}' end, space,
                    case when found_shelves[i] is null then '{}' else array[found_shelves[i]] end,
                    sha256(convert_to(secret, 'UTF8'))) n where n.what = 'c';
                if key is not null and not pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || key, 0)) then
                    raise exception using errcode = 'RD000';
                end if;
            exception when sqlstate 'RD000' then got := null;
            end;
            exit when got is not null;
        end loop;
        exit when got is not null;
        if found_ids is not null and cardinality(tried) < 2000 then
            look := 10000;
        elsif found_ids is null and look < 10000 and seen = look then
            look := 10000;
        elsif found_ids is null and seen = look and not shelved then
            shelved := true;
            perform durable.pick_instances(
                claim_next.queue, 1000, 'runner:' || owner, seconds, '{}', array_agg(q.priority), array_agg('-infinity'::timestamptz),
                array_agg((-9223372036854775808)::bigint), '{}', space, '{}', null)
               from (select distinct g.priority from durable.gen_durable g
                      where durable.offered(g.status, g.hold) and g.queue = claim_next.queue) q;
        elsif not swept then
            swept := true;
            freed := array(select k.key from durable.sweep_keys('', 100) k where k.stuck and k.key is not null);
            if freed = '{}' then return; end if;
            perform durable.promote_siblings(freed);
        else
            return;
        end if;
    end loop;
    return query select * from durable.claimed_row(got, secret);
end $$;

-- What a runner is told about its claim: the row, its inbox, the children of its barrier. The token ends with the ids of the signals
-- that the step is handed (those that it awaited), then of those beyond the first thousand: complete consumes the former.
create function durable.claimed_row(instance bigint, secret text)
returns table (id bigint, claim_id uuid, token text, lease_until timestamptz, machine text, version int, step text, state jsonb,
               attempt int, visit bigint, idempotency_key text, partition_key text, parent_id bigint, awaited jsonb, signals jsonb,
               more_signals boolean, children jsonb, children_counts jsonb, decision jsonb, cancellation jsonb)
language sql volatile as $$
with mine as materialized (
    select g.* from durable.gen_durable g where g.id = instance
), inbox as materialized (
    select s.id, s.name, jsonb_build_object('id', s.id, 'name', s.name, 'payload', s.payload, 'dedup_key', s.dedup_key,
                                            'inserted_at', s.inserted_at) as told
      from durable.signals s where s.target_id = instance and s.consumed_at is null order by s.id limit 1001
), matching as materialized (
    select s.id, row_number() over (order by s.id) as nth,
           jsonb_build_object('id', s.id, 'name', s.name, 'payload', s.payload, 'dedup_key', s.dedup_key, 'inserted_at', s.inserted_at) as told
      from durable.signals s where s.target_id = instance and s.consumed_at is null and s.name = any ((select m.awaits from mine m)::text[])
), brood as materialized (
    select b.id, b.status, jsonb_build_object('id', b.id, 'machine', b.fsm, 'status', b.status, 'result', b.result, 'last_error', b.last_error) as told
      from mine m join durable.gen_durable b on b.parent_id = m.id and b.barrier = m.visit where m.children_total > 0
)
select m.id, m.claim_id,
       secret || coalesce((select ':' || string_agg(a.id::text, ',' order by a.id) filter (where a.nth <= 1000)
                                  || coalesce(':' || string_agg(a.id::text, ',' order by a.id) filter (where a.nth > 1000), '') from matching a), ''),
       m.lease_expires_at, m.fsm, m.fsm_version, m.step, m.state, m.attempt, m.visit, m.id || '/' || m.visit || '/' || m.step,
       m.partition_key, m.parent_id,
       coalesce((select jsonb_agg(a.told order by a.id) from matching a where a.nth <= 1000), '[]'),
       coalesce((select jsonb_agg(i.told order by i.id) from (select * from inbox order by id limit 1000) i), '[]'),
       (select count(*) > 1000 from inbox),
       case when (select count(*) from brood) > 10000 then null else coalesce((select jsonb_agg(b.told order by b.id) from brood b), '[]') end,
       coalesce((select jsonb_object_agg(n.status, n.count) from (select b.status, count(*) from brood b group by b.status) n), '{}'),
       m.manual -> 'decision', m.cancellation
  from mine m
$$;

comment on function durable.claim_next is 'durable_actors: claim a due instance for a worker in any language';
comment on function durable.heartbeat is 'durable_actors: extend the lease of a claim';
comment on function durable.complete is 'durable_actors: commit the outcome of a claimed step';
comment on function durable.fail is 'durable_actors: a claimed step has failed; it is retried, or ends as failed';
