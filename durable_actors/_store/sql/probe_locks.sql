-- probe_locks: which of these rows nobody has locked right now. One that does not exist is free: nobody can hold it.
-- params   $1 id bigint[]
-- returns  id of the free ones
-- locks    taken with SKIP LOCKED and given back at once: the statement is its own transaction
-- index    gen_durable_pkey
with free as materialized (
    select g.id from durable.gen_durable g where g.id = any ($1::bigint[]) order by g.id for no key update skip locked
)
select f.id from free f
union all
select u.id from unnest($1::bigint[]) u(id) where not exists (select 1 from durable.gen_durable g where g.id = u.id)
