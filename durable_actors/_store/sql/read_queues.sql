-- read_queues: how much work each queue has: on offer (due, later), held, shelved, paused, executing; its pauses. For operators.
-- params   none
-- returns  queue, due, scheduled, held, shelved, executing, age of the oldest of the due ones in seconds or null, how many of its instances
--          are paused and would be runnable, and the pauses of the queue and of machines in it: JSON list of (machine or '', until, at, by,
--          reason), or null
-- locks    none
-- index    gen_durable_pick, gen_durable_held, gen_durable_shelf, gen_durable_paused, gen_durable_executing, pauses_pkey: finished and parked rows are not
--          read; the cost grows with what waits
with counts as materialized (
    select g.queue, count(*) filter (where durable.due(g.eligible_at)) as due, count(*) filter (where not durable.due(g.eligible_at)) as later,
           0::bigint as held, 0::bigint as shelved, 0::bigint as executing, min(g.eligible_at) as oldest, 0::bigint as paused
      from durable.gen_durable g where durable.offered(g.status, g.hold) group by g.queue
    union all
    select g.queue, 0, 0, count(*), 0, 0, null, 0
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 1 group by g.queue
    union all
    select g.queue, 0, 0, 0, count(*), 0, null, 0
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 2 group by g.queue
    union all
    select g.queue, 0, 0, 0, 0, 0, null, count(*)
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 4 group by g.queue
    union all
    select g.queue, 0, 0, 0, 0, count(*), null, 0
      from durable.gen_durable g where g.status = 'executing' group by g.queue
    union all
    select distinct p.queue, 0, 0, 0, 0, 0, null::timestamptz, 0 from durable.pauses p where durable.lasts(p.until)
)
select c.queue, sum(c.due)::bigint, sum(c.later)::bigint, sum(c.held)::bigint, sum(c.shelved)::bigint,
       sum(c.executing)::bigint,
       (extract(epoch from durable.now()) - extract(epoch from min(c.oldest) filter (where durable.due(c.oldest))))::float8,
       sum(c.paused)::bigint,
       (select jsonb_agg(jsonb_build_array(p.fsm, p.until, p.at, p.by, p.reason) order by p.fsm)
          from durable.pauses p where p.queue = c.queue and durable.lasts(p.until))
  from counts c group by c.queue order by c.queue
