-- lock_node: show that this incarnation lives, for as long as this session does.
-- params   $1 schema text · $2 owner text
-- returns  pg_backend_pid(), got boolean (false: a session that is not gone yet still has it)
-- locks    the owner's session advisory lock (the one that read_owners looks for); never waits
select pg_backend_pid(), pg_try_advisory_lock(hashtextextended($1::text || chr(2) || $2::text, 0))
