-- block_limits: let nothing that uses these limits begin for a while, because what they protect has said so.
-- params   $1 schema text · $2 names and keys text[] · $3 seconds float8
-- returns  nothing
-- locks    the advisory locks of the keys, in their order: it waits for picks, which wait for nobody
-- keeps    a level is changed only by who holds the lock of its key; a longer block stays
select durable.block_limits($1::text, $2::text[], $3::float8)
