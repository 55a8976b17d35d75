-- read_claims: who owns these instances now, read without a lock.
-- params   $1 id bigint[]
-- returns  id, claim_id, visit, status, state, request; a deleted row is missing
-- locks    none
-- index    gen_durable_pkey
select g.id, g.claim_id, g.visit, g.status, g.state, g.request from durable.gen_durable g where g.id = any ($1::bigint[])
