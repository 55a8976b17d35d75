-- read_queues: how much work each queue has: on offer (due, later), held, shelved, executing. For operators.
-- params   none
-- returns  queue, due, scheduled, held, shelved, executing, age of the oldest of the due ones in seconds or null
-- locks    none
-- index    gen_durable_pick, gen_durable_held, gen_durable_shelf, gen_durable_executing: finished and parked rows are not
--          read; the cost grows with what waits
with counts as materialized (
    select g.queue, count(*) filter (where durable.due(g.eligible_at)) as due, count(*) filter (where not durable.due(g.eligible_at)) as later,
           0::bigint as held, 0::bigint as shelved, 0::bigint as executing, min(g.eligible_at) as oldest
      from durable.gen_durable g where durable.offered(g.status, g.hold) group by g.queue
    union all
    select g.queue, 0, 0, count(*), 0, 0, null
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 1 group by g.queue
    union all
    select g.queue, 0, 0, 0, count(*), 0, null
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 2 group by g.queue
    union all
    select g.queue, 0, 0, 0, 0, count(*), null
      from durable.gen_durable g where g.status = 'executing' group by g.queue
)
select c.queue, sum(c.due)::bigint, sum(c.later)::bigint, sum(c.held)::bigint, sum(c.shelved)::bigint,
       sum(c.executing)::bigint,
       (extract(epoch from durable.now()) - extract(epoch from min(c.oldest) filter (where durable.due(c.oldest))))::float8
  from counts c group by c.queue order by c.queue
