-- read_declared: which schedules the nodes that are alive have in their code, and in which revision.
-- params   $1 schema text
-- returns  the name of the schedule, its revision; a pair may come several times
-- locks    none: pg_locks is read, nothing is tried
with locks as materialized (
    select l.classid::bigint << 32 | l.objid::bigint as hash
      from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
)
select d.key, d.value
  from durable.nodes n
 cross join lateral jsonb_each_text(
     case when jsonb_typeof(n.about -> 'schedules') = 'object' then n.about -> 'schedules' else '{}' end) d(key, value)
 where hashtextextended($1::text || chr(2) || n.incarnation, 0) in (select l.hash from locks l)
