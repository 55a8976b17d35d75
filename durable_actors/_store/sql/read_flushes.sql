-- read_flushes: which group commits that deleted rows were committed, and what of their instances they did not delete.
-- params   $1 token uuid[]
-- returns  token, ids that it did not delete. A token that is missing was not committed, or not yet
-- locks    none
-- index    flushes_pkey
select f.token, f.kept from durable.flushes f where f.token = any ($1::uuid[])
