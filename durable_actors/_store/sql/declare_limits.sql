-- declare_limits: write the limits that the code of a node declares, where its declaration differs from the one that is there.
-- params   arrays, one element per limit: $1 name text[] · $2 declaration text[] (JSON) · $3 revision text[] · $4 seconds for one token
--          float8[] or null · $5 burst float8[] · $6 slots int[] or null; $7 node text
-- returns  the names that were written
-- locks    the rows of the limits, in the order of their names
-- keeps    an operator's override: it counts until it is cleared. Throttled rows under a changed limit are looked at again at once
with given as materialized (
    select u.* from unnest($1::text[], $2::text[], $3::text[], $4::float8[], $5::float8[], $6::int[]) u(name, declared, revision, interval, burst, slots)
     order by u.name
), written as (
    insert into durable.limits as l (name, declared, revision, declared_at, declared_by, interval, burst, slots, on_full, held)
    select g.name, g.declared::jsonb, g.revision, durable.now(), $7::text, g.interval, g.burst, g.slots,
           coalesce(g.declared::jsonb ->> 'on_full', 'wait'), coalesce(g.declared::jsonb ->> 'held', 'step') from given g order by g.name
        on conflict (name) do update
       set declared = excluded.declared, revision = excluded.revision, declared_at = excluded.declared_at, declared_by = excluded.declared_by,
           interval = case when l.override is null then excluded.interval else l.interval end,
           burst = case when l.override is null then excluded.burst else l.burst end,
           slots = case when l.override is null then excluded.slots else l.slots end,
           on_full = case when l.override is null then excluded.on_full else l.on_full end,
           held = case when l.override is null then excluded.held else l.held end
     where l.revision is distinct from excluded.revision
    returning l.name
), looked as (
    update durable.limit_waits w set next_at = durable.now()
     where (w.key, w.queue) in (select x.key, x.queue from durable.limit_waits x
                                 where split_part(x.key, ':', 1) in (select n.name from written n) for update skip locked)
)
select n.name from written n
