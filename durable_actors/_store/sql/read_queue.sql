-- read_queue: what a feeder should look for: the priorities in use, when the next future row is due, shelved steps.
-- params   $1 queue text · $2 seconds since the pick before this was sent float8: a row that became due meanwhile was future to the
--          pick and is past now, so it counts as future here, with a time of 0 or less
-- returns  priority smallint or null · seconds until its next future row float8 or null · shelved step text (as the pick knows it) or null ·
--          seconds until the next deadline of a parked row float8 or null · a paused machine text, '' for the whole queue, or null ·
--          seconds until its pause is over float8, or null. A paused queue has neither priorities nor shelved steps, and a paused machine no
--          shelved steps: there is nothing to pick. A time without a priority: when to look at throttled rows
-- locks    none
-- index    pauses_pkey, limit_waits_due; gen_durable_pick, gen_durable_shelf and gen_durable_deadline, a few probes per priority and step, whatever the backlog
-- hostile  epochs are subtracted, not instants: before Postgres 17 an infinite one refuses that, and one row would stop its queue
with recursive p(priority) as (
    (select g.priority from durable.gen_durable g
      where durable.offered(g.status, g.hold) and g.queue = $1::text
        and (select s.machines is null or '' <> all (s.machines) from stopped s)
      order by g.priority limit 1)
    union all
    select (select g.priority from durable.gen_durable g
             where durable.offered(g.status, g.hold) and g.queue = $1::text and g.priority > p.priority
             order by g.priority limit 1)
      from p where p.priority is not null
), m(fsm, version, step) as (
    (select g.fsm, g.fsm_version, coalesce(g.shelved_step, '') as step from durable.gen_durable g
      where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text
        and (select s.machines is null or '' <> all (s.machines) from stopped s)
      order by g.fsm, g.fsm_version, coalesce(g.shelved_step, '') limit 1)
    union all
    select n.fsm, n.fsm_version, n.step
      from m cross join lateral (
        select g.fsm, g.fsm_version, coalesce(g.shelved_step, '') as step from durable.gen_durable g
         where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text
           and (g.fsm, g.fsm_version, coalesce(g.shelved_step, '')) > (m.fsm, m.version, m.step)
         order by g.fsm, g.fsm_version, coalesce(g.shelved_step, '') limit 1) n
), stopped as materialized (
    select array_agg(x.fsm) as machines from durable.pauses x where x.queue = $1::text and durable.lasts(x.until)
)
select p.priority, (extract(epoch from f.eligible_at) - extract(epoch from durable.now()))::float8, null::text, null::float8,
       null::text, null::float8
  from p left join lateral (
    select g.eligible_at from durable.gen_durable g
     where durable.offered(g.status, g.hold) and g.queue = $1::text and g.priority = p.priority
       and g.eligible_at > durable.now() - make_interval(secs => $2::float8)
     order by g.eligible_at limit 1) f on true
 where p.priority is not null
union all
select null, null, m.fsm || chr(31) || m.version || chr(31) || m.step, null::float8, null, null from m
 where (select s.machines is null or m.fsm <> all (s.machines) from stopped s)
union all
select null, null, null, (extract(epoch from d.await_deadline) - extract(epoch from durable.now()))::float8, null, null
  from (select g.await_deadline from durable.gen_durable g
         where g.queue = $1::text and g.status in ('awaiting_signal', 'awaiting_children') and g.await_deadline is not null
         order by g.await_deadline limit 1) d
union all
select null, (extract(epoch from w.next_at) - extract(epoch from durable.now()))::float8, null, null, null, null
  from (select t.next_at from durable.limit_waits t where t.queue = $1::text order by t.next_at limit 1) w
 where (select s.machines is null or '' <> all (s.machines) from stopped s)
union all
select null, null, null, null, x.fsm, (extract(epoch from x.until) - extract(epoch from durable.now()))::float8
  from durable.pauses x where x.queue = $1::text and durable.lasts(x.until)
