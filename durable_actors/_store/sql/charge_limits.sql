-- charge_limits: charge what steps have spent beyond their weights, or give back what was charged for steps that never began.
-- params   $1 schema text · $2 names and keys text[] · $3 weights float8[], negative ones to give back
-- returns  nothing
-- locks    the advisory locks of the keys, in their order: it waits for picks, which wait for nobody
-- keeps    a level is changed only by who holds the lock of its key
select durable.charge_limits($1::text, $2::text[], $3::float8[])
