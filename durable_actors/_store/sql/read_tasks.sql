-- read_tasks: the tasks of a workflow: the children of one barrier that have a key, with their results and what they come after.
-- params   $1 parent bigint · $2 barrier bigint
-- returns  id, key, machine, status, result, what it comes after (an array of ids as text, which drivers agree on; or null), in spawn order
-- locks    none
-- index    gen_durable_parent, graph_pkey
select g.id, g.child_key, g.fsm, g.status, g.result, e.needs::text
  from durable.gen_durable g
  left join durable.graph e on e.id = g.id and g.links is not null
 where g.parent_id = $1::bigint and g.barrier = $2::bigint and g.child_key is not null
 order by g.id
