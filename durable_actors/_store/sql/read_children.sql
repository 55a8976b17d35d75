-- read_children: a barrier's children in spawn order, after the id $3, the first $4.
-- params   $1 parent bigint · $2 barrier bigint · $3 after bigint · $4 limit int
-- returns  id, fsm, status, result, last_error, key
-- locks    none
-- index    gen_durable_parent
select c.id, c.fsm, c.status, c.result, c.last_error, c.child_key
  from durable.gen_durable c
 where c.parent_id = $1::bigint and c.barrier = $2::bigint and c.id > $3::bigint
 order by c.id limit $4::int
