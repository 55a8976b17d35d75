-- find_undeclared: names of limits under which instances wait, and which nobody has declared. For the dashboard's sampler.
-- params   $1 lines of limit_waits to look at int · $2 names to return int
-- returns  name, in order
-- locks    none
-- index    limits_pkey
-- cost     linear in the lines that are looked at
select n.name
  from (select distinct split_part(w.key, ':', 1) as name from (select x.key from durable.limit_waits x limit $1::int) w) n
 where not exists (select 1 from durable.limits l where l.name = n.name)
 order by n.name limit $2::int
