-- find_by_key: the instance that occupies a unique key, else the newest one that had it.
-- params   $1 key bytea
-- returns  id
-- locks    none
-- index    gen_durable_unique, gen_durable_key_history
(select g.id, 0 as place from durable.gen_durable g where g.unique_guard = $1::bytea)
union all
(select g.id, 1 from durable.gen_durable g where g.unique_key = $1::bytea order by g.id desc limit 1)
order by place limit 1
