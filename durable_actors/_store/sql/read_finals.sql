-- read_finals: how instances ended, if they did; for those who wait for results.
-- params   $1 id bigint[]
-- returns  id, status, result, last_error
-- locks    none
-- index    gen_durable_pkey
select g.id, g.status, case when g.status = 'done' then g.result end, case when g.status in ('failed', 'cancelled') then g.last_error end
  from durable.gen_durable g
 where g.id = any ($1::bigint[])
