-- probe_locks: which of these rows nobody has locked right now.
-- params   $1 id bigint[]
-- returns  id of the free ones
-- locks    taken with SKIP LOCKED and given back at once: the statement is its own transaction
-- index    gen_durable_pkey
select g.id from durable.gen_durable g where g.id = any ($1::bigint[]) order by g.id for no key update skip locked
