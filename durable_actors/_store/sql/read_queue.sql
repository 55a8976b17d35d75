-- read_queue: what a feeder should look for: the priorities in use, when the next future row is due, shelved machines.
-- params   $1 queue text
-- returns  priority smallint or null · seconds until its next future row float8 or null · shelved machine text or null
-- locks    none
-- index    gen_durable_pick and gen_durable_shelf, a few probes per priority and machine, whatever the backlog
with recursive p(priority) as (
    (select g.priority from durable.gen_durable g
      where g.status = 'runnable' and g.hold = 0 and g.queue = $1::text order by g.priority limit 1)
    union all
    select (select g.priority from durable.gen_durable g
             where g.status = 'runnable' and g.hold = 0 and g.queue = $1::text and g.priority > p.priority
             order by g.priority limit 1)
      from p where p.priority is not null
), m(fsm, version) as (
    (select g.fsm, g.fsm_version from durable.gen_durable g
      where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text order by g.fsm, g.fsm_version limit 1)
    union all
    select n.fsm, n.fsm_version
      from m cross join lateral (
        select g.fsm, g.fsm_version from durable.gen_durable g
         where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text and (g.fsm, g.fsm_version) > (m.fsm, m.version)
         order by g.fsm, g.fsm_version limit 1) n
)
select p.priority, extract(epoch from f.eligible_at - now())::float8, null
  from p left join lateral (
    select g.eligible_at from durable.gen_durable g
     where g.status = 'runnable' and g.hold = 0 and g.queue = $1::text and g.priority = p.priority and g.eligible_at > now()
     order by g.eligible_at limit 1) f on true
 where p.priority is not null
union all
select null, null, m.fsm || '/' || m.version from m
