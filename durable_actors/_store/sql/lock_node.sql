-- lock_node: take the lock that shows that this incarnation is alive, as long as this session exists.
-- params   $1 schema text · $2 owner text
-- returns  pg_backend_pid(), got boolean (false: another session still has it)
-- locks    the owner's session advisory lock (the one that read_owners looks for); never waits
select pg_backend_pid(), pg_try_advisory_lock(hashtextextended($1::text || chr(2) || $2::text, 0))
