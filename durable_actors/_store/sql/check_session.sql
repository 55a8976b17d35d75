-- check_session: whether this connection still reaches the server process that holds our locks.
-- params   $1 schema text · $2 owner text
-- returns  pg_backend_pid(), held boolean: that process has the owner's lock
-- locks    none: pg_locks is read
select pg_backend_pid(),
       exists (select 1 from pg_locks l
                where l.locktype = 'advisory' and l.objsubid = 1 and l.granted and l.pid = pg_backend_pid()
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())
                  and (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended($1::text || chr(2) || $2::text, 0))
