-- read_nodes: who works or worked here, who of them lives, and what each holds. For operators.
-- params   $1 schema text
-- returns  incarnation, node, started_at, seen_at, stopped_at, about jsonb, alive (a session holds its lock), claims;
--          owners of claims that the table does not know are returned with their name alone
-- locks    none: pg_locks is read, nothing is tried
-- index    gen_durable_executing
with claims as materialized (
    select g.locked_by, count(*) as n from durable.gen_durable g where g.status = 'executing' group by g.locked_by
), locks as materialized (
    select l.classid::bigint << 32 | l.objid::bigint as hash
      from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
)
select coalesce(n.incarnation, c.locked_by), n.node, n.started_at, n.seen_at, n.stopped_at, n.about,
       hashtextextended($1::text || chr(2) || coalesce(n.incarnation, c.locked_by), 0) in (select l.hash from locks l),
       coalesce(c.n, 0)
  from durable.nodes n full join claims c on c.locked_by = n.incarnation
 order by n.started_at, 1
