-- read_frontier: what a bulk command freezes at its beginning.
-- params   $1 seconds float8, or null
-- returns  the highest id, 0 if there is none · the instant so many seconds ago
-- locks    none
-- index    gen_durable_pkey
select coalesce((select g.id from durable.gen_durable g order by g.id desc limit 1), 0), durable.now() - make_interval(secs => $1::float8)
