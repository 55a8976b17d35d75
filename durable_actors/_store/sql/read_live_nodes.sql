-- read_live_nodes: the nodes that are alive (a session holds their lock) and the version that each runs.
-- params   $1 schema text
-- returns  incarnation, version text
-- locks    none: pg_locks is read, nothing is tried
with locks as materialized (
    select l.classid::bigint << 32 | l.objid::bigint as hash
      from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
)
select n.incarnation, n.about ->> 'version'
  from durable.nodes n
 where hashtextextended($1::text || chr(2) || n.incarnation, 0) in (select l.hash from locks l)
 order by n.started_at, n.incarnation
