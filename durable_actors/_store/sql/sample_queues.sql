-- sample_queues: how much work each queue has, counted up to a cap. For the dashboard's sampler.
-- params   $1 cap int: of each queue and kind so many rows are counted at most; held ones, executing ones and persons in all queues together
-- returns  queue, due, scheduled, held, shelved, paused, executing, asks, age of the oldest due row that was seen in seconds or null, whether
--          rows on offer were not counted, pauses of the queue as in read_queues
-- locks    none
-- index    gen_durable_pick, gen_durable_shelf, gen_durable_paused (each skips from queue to queue), gen_durable_held, gen_durable_executing,
--          gen_durable_manual, pauses_pkey
-- cost     the caps, whatever waits
with recursive queues(name) as (
    (select g.queue from durable.gen_durable g where durable.offered(g.status, g.hold) order by g.queue limit 1)
    union all
    select (select g.queue from durable.gen_durable g where durable.offered(g.status, g.hold) and g.queue > o.name order by g.queue limit 1)
      from queues o where o.name is not null
), shelves(name) as (
    (select g.queue from durable.gen_durable g where g.status = 'runnable' and g.hold = 2 order by g.queue limit 1)
    union all
    select (select g.queue from durable.gen_durable g where g.status = 'runnable' and g.hold = 2 and g.queue > o.name order by g.queue limit 1)
      from shelves o where o.name is not null
), stopped(name) as (
    (select g.queue from durable.gen_durable g where g.status = 'runnable' and g.hold = 4 order by g.queue limit 1)
    union all
    select (select g.queue from durable.gen_durable g where g.status = 'runnable' and g.hold = 4 and g.queue > o.name order by g.queue limit 1)
      from stopped o where o.name is not null
), counts(queue, due, later, held, shelved, paused, executing, asks, oldest, more) as materialized (
    select o.name, c.due, c.later, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, c.oldest, c.looked >= $1::int
      from queues o
     cross join lateral (
        select count(*) filter (where durable.due(w.eligible_at)) as due, count(*) filter (where not durable.due(w.eligible_at)) as later,
               count(*) as looked, min(w.eligible_at) filter (where durable.due(w.eligible_at)) as oldest
          from (select g.eligible_at from durable.gen_durable g
                 where durable.offered(g.status, g.hold) and g.queue = o.name order by g.queue, g.priority, g.eligible_at limit $1::int) w) c
     where o.name is not null
    union all
    select o.name, 0, 0, 0, c.n, 0, 0, 0, null, false
      from shelves o
     cross join lateral (select count(*) as n from (
        select 1 from durable.gen_durable g where g.status = 'runnable' and g.hold = 2 and g.queue = o.name limit $1::int) w) c
     where o.name is not null
    union all
    select o.name, 0, 0, 0, 0, c.n, 0, 0, null, false
      from stopped o
     cross join lateral (select count(*) as n from (
        select 1 from durable.gen_durable g where g.status = 'runnable' and g.hold = 4 and g.queue = o.name limit $1::int) w) c
     where o.name is not null
    union all
    select w.queue, 0, 0, count(*), 0, 0, 0, 0, null, false
      from (select g.queue from durable.gen_durable g where g.status = 'runnable' and g.hold = 1 limit $1::int) w group by w.queue
    union all
    select w.queue, 0, 0, 0, 0, 0, count(*), 0, null, false
      from (select g.queue from durable.gen_durable g where g.status = 'executing' limit $1::int) w group by w.queue
    union all
    select w.queue, 0, 0, 0, 0, 0, 0, count(*), null, false
      from (select g.queue from durable.gen_durable g
             where g.status = 'awaiting_signal' and g.manual is not null and durable.waits_for(g.status, g.manual) in ('approval', 'pause')
             limit $1::int) w group by w.queue
    union all
    select distinct p.queue, 0, 0, 0, 0, 0, 0, 0, null::timestamptz, false from durable.pauses p where durable.lasts(p.until)
)
select c.queue, sum(c.due)::bigint, sum(c.later)::bigint, sum(c.held)::bigint, sum(c.shelved)::bigint, sum(c.paused)::bigint,
       sum(c.executing)::bigint, sum(c.asks)::bigint,
       (extract(epoch from durable.now()) - extract(epoch from min(c.oldest)))::float8, bool_or(c.more),
       (select jsonb_agg(jsonb_build_array(p.fsm, p.until, p.at, p.by, p.reason) order by p.fsm)
          from durable.pauses p where p.queue = c.queue and durable.lasts(p.until))
  from counts c group by c.queue order by c.queue
