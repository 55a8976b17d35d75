-- count_children: the number of a barrier's children, by status.
-- params   $1 parent bigint · $2 barrier bigint
-- returns  status, count
-- locks    none
-- index    gen_durable_parent
-- cost     linear in the children: used only if there are too many to read them
select c.status, count(*) from durable.gen_durable c
 where c.parent_id = $1::bigint and c.barrier = $2::bigint
 group by c.status
