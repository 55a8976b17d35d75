-- sample_steps: where instances stand: how many in each step, and for how long. Counted up to caps. For the dashboard's machines.
-- params   $1 cap int: rows of each source · $2 window int: the newest instances, among which waits without a deadline are looked for
-- returns  source, kind, fsm, version, step, how many, seconds of the oldest, seconds that 95 of 100 do not exceed. The age counts from when
--          it could run, began to run, to wait, or failed; null for what is not due. The row of source 'window' has how many were looked at.
-- locks    none
-- index    gen_durable_pick, gen_durable_held, gen_durable_shelf, gen_durable_throttled, gen_durable_paused, gen_durable_executing,
--          gen_durable_deadline, gen_durable_manual, gen_durable_failed; the window gen_durable_pkey. Each source is read in the order of its index: a limit alone
--          would let the planner scan the table.
-- cost     the caps, whatever waits: no index has the waits without a deadline, nor those for what an instance comes after
with win as materialized (
    select g.id, g.status, g.fsm, g.fsm_version, g.step, g.updated_at, g.await_deadline, g.manual is not null as asks,
           g.hold
      from durable.gen_durable g order by g.id desc limit $2::int
), found as (
    (select 'offered' as source, case when durable.due(g.eligible_at) then 'ready' else 'scheduled' end as kind, g.fsm, g.fsm_version, g.step,
            case when durable.due(g.eligible_at) then g.eligible_at end as since
       from durable.gen_durable g where durable.offered(g.status, g.hold) order by g.queue, g.priority, g.eligible_at, g.id limit $1::int)
    union all
    (select 'held', 'held', g.fsm, g.fsm_version, g.step, g.eligible_at
       from durable.gen_durable g where g.status = 'runnable' and g.hold = 1 order by g.partition_key, g.priority, g.eligible_at, g.id limit $1::int)
    union all
    (select 'shelved', 'shelved', g.fsm, g.fsm_version, g.step, g.eligible_at
       from durable.gen_durable g where g.status = 'runnable' and g.hold = 2
      order by g.queue, g.fsm, g.fsm_version, coalesce(g.shelved_step, ''), g.priority, g.eligible_at, g.id limit $1::int)
    union all
    (select 'throttled', 'limited', g.fsm, g.fsm_version, g.step, g.eligible_at
       from durable.gen_durable g where g.status = 'runnable' and g.hold = 3
      order by g.queue, g.limited_by, g.priority, g.eligible_at, g.id limit $1::int)
    union all
    (select 'paused', 'paused', g.fsm, g.fsm_version, g.step, g.updated_at
       from durable.gen_durable g where g.status = 'runnable' and g.hold = 4 order by g.queue, g.id limit $1::int)
    union all
    (select 'running', 'running', g.fsm, g.fsm_version, g.step, g.updated_at
       from durable.gen_durable g where g.status = 'executing' order by g.locked_by limit $1::int)
    union all
    (select 'deadline', 'waiting', g.fsm, g.fsm_version, g.step, g.updated_at
       from durable.gen_durable g
      where g.status in ('awaiting_signal', 'awaiting_children') and g.await_deadline is not null
      order by g.queue, g.await_deadline limit $1::int)
    union all
    (select 'asks', 'waiting', g.fsm, g.fsm_version, g.step, g.updated_at
       from durable.gen_durable g
      where g.status = 'awaiting_signal' and g.manual is not null and g.await_deadline is null order by g.id desc limit $1::int)
    union all
    (select 'failed', 'failed', g.fsm, g.fsm_version, g.step, g.finished_at
       from durable.gen_durable g where g.status = 'failed' order by g.id desc limit $1::int)
    union all
    select 'newest', 'waiting', w.fsm, w.fsm_version, w.step, w.updated_at
      from win w
     where w.status in ('awaiting_signal', 'awaiting_children') and w.await_deadline is null and not w.asks
        or w.status = 'runnable' and w.hold = 5
)
select f.source, f.kind, f.fsm, f.fsm_version, f.step, count(*), max(a.age), percentile_cont(0.95) within group (order by a.age)
  from found f
 cross join lateral (
    select case when f.since is not null then greatest(extract(epoch from durable.now()) - extract(epoch from f.since), 0)::float8 end as age) a
 group by f.source, f.kind, f.fsm, f.fsm_version, f.step
union all
select 'window', 'looked', null, null, null, (select count(*) from win), null, null
