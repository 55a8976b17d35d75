-- free_keys: unlock partition keys that this session has locked, once each.
-- params   $1 schema text · $2 keys text[]
-- returns  key, had boolean (false: this session had not locked it, which is a fault)
-- locks    releases session advisory locks
with k as materialized (select u.key from unnest($2::text[]) u(key))
select k.key, pg_advisory_unlock(hashtextextended($1::text || chr(1) || k.key, 0)) from k
