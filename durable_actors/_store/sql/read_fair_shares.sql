-- read_fair_shares: what the keys of fair queues have running and waiting. For operators.
-- params   $1 queues text[] · $2 keys per queue to count, at most int
-- returns  queue, fair key ('': none), how many of its instances are executing, how many due or future ones are on offer: of each priority
--          1,000 at most, and null for rows without a key
-- locks    none
-- index    gen_durable_executing, gen_durable_fair: one probe for each key, and what is counted
with recursive keys(queue, priority, fair_key, n) as (
    select q.queue, f.priority, f.fair_key, 1
      from unnest($1::text[]) q(queue)
     cross join lateral (
        select g.priority, g.fair_key from durable.gen_durable g
         where durable.offered(g.status, g.hold) and g.queue = q.queue and g.fair_key is not null
         order by g.priority, g.fair_key limit 1) f
    union all
    select k.queue, f.priority, f.fair_key, k.n + 1
      from keys k
     cross join lateral (
        select g.priority, g.fair_key from durable.gen_durable g
         where durable.offered(g.status, g.hold) and g.queue = k.queue and g.fair_key is not null
           and (g.priority, g.fair_key) > (k.priority, k.fair_key)
         order by g.priority, g.fair_key limit 1) f
     where k.n < $2::int
)
select s.queue, s.fair_key, sum(s.running)::bigint, sum(s.waiting)::bigint
  from (
    select k.queue, k.fair_key, 0 as running, w.waiting
      from keys k
     cross join lateral (
        select count(*) as waiting from (
            select 1 from durable.gen_durable g
             where durable.offered(g.status, g.hold) and g.queue = k.queue and g.priority = k.priority and g.fair_key is not null
               and g.fair_key >= k.fair_key and g.fair_key <= k.fair_key
             order by g.fair_key limit 1000) c) w
    union all
    select g.queue, coalesce(g.fair_key, ''), count(*), null from durable.gen_durable g
     where g.status = 'executing' and g.queue = any ($1::text[]) group by g.queue, g.fair_key) s
 group by s.queue, s.fair_key
 order by s.queue, sum(s.running) desc, sum(s.waiting) desc nulls last, s.fair_key
