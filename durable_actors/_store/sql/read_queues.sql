-- read_queues: how much work each queue has: on offer (due, later), held, shelved, throttled, paused, executing; who waits for a person; its pauses. For operators.
-- params   none
-- returns  queue, due, scheduled, held, shelved, executing, age of the oldest of the due ones in seconds or null, how many of its instances
--          are paused and would be runnable, how many wait for a person, and the pauses of the queue and of machines in it: JSON list of (machine or '', until, at, by,
--          reason), or null; how many wait for a limit
-- locks    none
-- index    gen_durable_pick, gen_durable_held, gen_durable_shelf, gen_durable_throttled, gen_durable_paused, gen_durable_executing, gen_durable_manual, pauses_pkey: of finished
--          and parked rows only those that wait for a person are read; the cost grows with what waits
with counts as materialized (
    select g.queue, count(*) filter (where durable.due(g.eligible_at)) as due, count(*) filter (where not durable.due(g.eligible_at)) as later,
           0::bigint as held, 0::bigint as shelved, 0::bigint as executing, min(g.eligible_at) as oldest, 0::bigint as paused, 0::bigint as asks, 0::bigint as throttled
      from durable.gen_durable g where durable.offered(g.status, g.hold) group by g.queue
    union all
    select g.queue, 0, 0, count(*), 0, 0, null, 0, 0, 0
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 1 group by g.queue
    union all
    select g.queue, 0, 0, 0, count(*), 0, null, 0, 0, 0
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 2 group by g.queue
    union all
    select g.queue, 0, 0, 0, 0, 0, null, 0, 0, count(*)
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 3 group by g.queue
    union all
    select g.queue, 0, 0, 0, 0, 0, null, count(*), 0, 0
      from durable.gen_durable g where g.status = 'runnable' and g.hold = 4 group by g.queue
    union all
    select g.queue, 0, 0, 0, 0, count(*), null, 0, 0, 0
      from durable.gen_durable g where g.status = 'executing' group by g.queue
    union all
    select g.queue, 0, 0, 0, 0, 0, null, 0, count(*), 0
      from durable.gen_durable g
     where g.status = 'awaiting_signal' and g.manual is not null and durable.waits_for(g.status, g.manual) in ('approval', 'pause')
     group by g.queue
    union all
    select distinct p.queue, 0, 0, 0, 0, 0, null::timestamptz, 0, 0, 0 from durable.pauses p where durable.lasts(p.until)
)
select c.queue, sum(c.due)::bigint, sum(c.later)::bigint, sum(c.held)::bigint, sum(c.shelved)::bigint,
       sum(c.executing)::bigint,
       (extract(epoch from durable.now()) - extract(epoch from min(c.oldest) filter (where durable.due(c.oldest))))::float8,
       sum(c.paused)::bigint, sum(c.asks)::bigint,
       (select jsonb_agg(jsonb_build_array(p.fsm, p.until, p.at, p.by, p.reason) order by p.fsm)
          from durable.pauses p where p.queue = c.queue and durable.lasts(p.until)),
       sum(c.throttled)::bigint
  from counts c group by c.queue order by c.queue
