-- forget_limit_keys: delete keys of limits that have been at rest for long: a key without a row is one at rest. Else each tenant would leave one.
-- params   $1 seconds float8 · $2 how many at most int
-- returns  how many were deleted
-- locks    the rows, SKIP LOCKED: whoever charges a key just now keeps its row
-- index    limit_keys_pkey; the table is read until enough are found
with old as materialized (
    select s.key from durable.limit_keys s
     where greatest(s.tat, s.at, s.blocked) < durable.now() - make_interval(secs => $1::float8)
     limit $2::int for update skip locked
), gone as (
    delete from durable.limit_keys s where s.key = any (array(select o.key from old o)) returning 1
)
select count(*) from gone
