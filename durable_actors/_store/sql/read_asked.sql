-- read_asked: what instances that wait for a person tell them, without what is too large for a list. For the dashboard.
-- params   $1 id bigint[] · $2 bytes int: larger data are not returned
-- returns  id · the data of its boundary, null if there are none or if they are larger · their size in bytes, null if there are none
-- locks    none
-- index    gen_durable_pkey
select g.id, case when pg_column_size(g.manual -> 'data') <= $2::int then g.manual -> 'data' end, pg_column_size(g.manual -> 'data')
  from durable.gen_durable g
 where g.id = any ($1::bigint[])
