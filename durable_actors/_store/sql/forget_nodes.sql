-- forget_nodes: delete incarnations from the list of nodes that are gone for long. Never waits for a row.
-- params   $1 schema text · $2 seconds since a stop in good order float8 · $3 seconds since it was last seen float8 · $4 limit int
-- returns  the deleted incarnations
-- locks    FOR UPDATE SKIP LOCKED on the rows
-- index    nodes_pkey, gen_durable_executing
-- keeps    incarnations that hold claims (operators must be able to see whose they are), and those that are alive (their session
--          holds their lock), however long ago they were seen: the row may have been locked at every heartbeat. pg_locks is read
--          only if there is a candidate.
with locks as materialized (
    select l.classid::bigint << 32 | l.objid::bigint as hash
      from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
)
delete from durable.nodes n
 where n.incarnation = any (array(
    select o.incarnation from durable.nodes o
     where (o.stopped_at < pg_catalog.now() - make_interval(secs => $2::float8) or o.seen_at < pg_catalog.now() - make_interval(secs => $3::float8))
       and not exists (
           select 1 from durable.gen_durable g where g.status = 'executing' and g.locked_by = o.incarnation)
       and hashtextextended($1::text || chr(2) || o.incarnation, 0) not in (select l.hash from locks l)
     order by o.seen_at, o.incarnation limit $4::int for update skip locked))
returning n.incarnation
