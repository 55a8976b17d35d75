-- read_owners: who holds claims now, until when at the latest and at the soonest, and whether its session lock is held.
-- params   $1 schema text
-- returns  locked_by, claims, soonest end of a lease in seconds from now, alive (a session holds the owner's lock),
--          seconds since the server started
-- locks    none: pg_locks is read, nothing is tried
-- index    gen_durable_executing
select g.locked_by, count(*), extract(epoch from min(g.lease_expires_at) - now())::float8,
       exists (select 1 from pg_locks l
                where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())
                  and (l.classid::bigint << 32 | l.objid::bigint)
                      = hashtextextended($1::text || chr(2) || g.locked_by, 0)),
       extract(epoch from now() - pg_postmaster_start_time())::float8
  from durable.gen_durable g
 where g.status = 'executing'
 group by g.locked_by
