-- take_keys: lock partition keys for this session, those that are free.
-- params   $1 schema text · $2 keys text[], each once, none of them locked by this session
-- returns  key, got boolean
-- locks    session advisory locks (hash seed 0; the pick's try-locks use seed 1). Never waits. They survive a rollback and
--          are counted: a key locked twice needs two unlocks.
-- plan     the lock call is in the output list over a materialised array: evaluated once per key, whatever the planner
--          does. In a WHERE or beside a LIMIT it would run for rows that are not returned.
with k as materialized (select u.key from unnest($2::text[]) u(key))
select k.key, pg_try_advisory_lock(hashtextextended($1::text || chr(1) || k.key, 0)) from k
