-- sample_limits: how many instances wait for each limit in each queue, counted up to a cap. For the dashboard's sampler.
-- params   $1 cap int: of each queue so many rows are counted at most, in the order of their limits
-- returns  queue, name of the limit, how many instances wait for it
-- locks    none
-- index    gen_durable_throttled: skips from queue to queue
-- cost     the cap, for each queue in which instances wait for a limit
with recursive queues(name) as (
    (select g.queue from durable.gen_durable g where g.status = 'runnable' and g.hold = 3 order by g.queue limit 1)
    union all
    select (select g.queue from durable.gen_durable g where g.status = 'runnable' and g.hold = 3 and g.queue > o.name order by g.queue limit 1)
      from queues o where o.name is not null
)
select o.name, c.name, c.n
  from queues o
 cross join lateral (
    select split_part(coalesce(w.limited_by, ''), ':', 1) as name, count(*) as n
      from (select g.limited_by from durable.gen_durable g
             where g.status = 'runnable' and g.hold = 3 and g.queue = o.name order by g.queue, g.limited_by limit $1::int) w
     group by 1) c
 where o.name is not null
 order by o.name, c.name
