-- read_first_held: the first held row of each key: what promote_siblings would offer.
-- params   $1 keys text[]
-- returns  id
-- locks    none; a row that is locked is returned, too
-- index    gen_durable_held
select h.id from unnest($1::text[]) u(key)
 cross join lateral (
    select y.id from durable.gen_durable y
     where y.partition_key = u.key and y.status = 'runnable' and y.hold = 1
     order by y.priority, y.eligible_at, y.id limit 1) h
