-- count_children: how many of a barrier's children have which status.
-- params   $1 parent bigint · $2 barrier bigint
-- returns  status, count
-- locks    none
-- index    gen_durable_parent
-- cost     the children's: asked only where they are too many to be read
select c.status, count(*) from durable.gen_durable c
 where c.parent_id = $1::bigint and c.barrier = $2::bigint
 group by c.status
