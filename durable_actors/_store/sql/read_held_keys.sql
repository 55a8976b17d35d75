-- read_held_keys: which of these keys this session has locked; the truth after a statement that was refused half-way.
-- params   $1 schema text · $2 keys text[]
-- returns  key
-- locks    none: pg_locks is read
select u.key from unnest($2::text[]) u(key)
 where hashtextextended($1::text || chr(1) || u.key, 0) in (
    select l.classid::bigint << 32 | l.objid::bigint from pg_locks l
     where l.locktype = 'advisory' and l.objsubid = 1 and l.granted and l.pid = pg_backend_pid()
       and l.database = (select d.oid from pg_database d where d.datname = current_database()))
