-- read_owners: the owners of claims, when their leases expire, and whether their session lock is held.
-- params   $1 schema text
-- returns  locked_by, claims, soonest end of a lease in seconds from now, latest end as seconds since the epoch (moves when
--          the owner claims or renews anything), alive (a session holds the owner's lock), seconds since the server
--          started, pg_backend_pid() of this session
-- locks    none: pg_locks is read, nothing is tried
-- index    gen_durable_executing
-- hostile  epochs are subtracted, not instants: before Postgres 17 an infinite one refuses that
with owners as materialized (
    select g.locked_by, count(*) as claims, max(g.lease_expires_at) as latest,
           -- A lease longer than any engine asks for was written by hand, and is over: reap_claims takes it.
           min(case when g.lease_expires_at > pg_catalog.now() + interval '11 years' then '-infinity' else g.lease_expires_at end) as soonest
      from durable.gen_durable g
     where g.status = 'executing'
     group by g.locked_by
), locks as materialized (
    select l.classid::bigint << 32 | l.objid::bigint as hash
      from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
)
select o.locked_by, o.claims, (extract(epoch from o.soonest) - extract(epoch from pg_catalog.now()))::float8, extract(epoch from o.latest)::float8,
       hashtextextended($1::text || chr(2) || o.locked_by, 0) in (select l.hash from locks l),
       extract(epoch from pg_catalog.now() - pg_postmaster_start_time())::float8, pg_backend_pid()
  from owners o
