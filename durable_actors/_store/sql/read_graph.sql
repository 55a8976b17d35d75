-- read_graph: the children of one barrier, with what each comes after: one picture of a graph.
-- params   $1 parent bigint · $2 barrier bigint, or null: the latest one whose children come after each other
-- returns  id, barrier, key, machine, step, status, hold, attempt, what it comes after (an array, or null), whether any end of those is good
--          enough, how many of those have not ended, inserted_at, eligible_at, finished_at, last_error; in spawn order. Nothing if there is no such barrier
-- locks    none
-- index    gen_durable_parent, graph_pkey
select g.id, g.barrier, g.child_key, g.fsm, g.step, g.status, g.hold, g.attempt, array_remove(e.needs, null), coalesce(e.any_end, false), coalesce(e.waits, 0),
       g.inserted_at, g.eligible_at, g.finished_at, g.last_error
  from durable.gen_durable g
  left join durable.graph e on e.id = g.id and g.links is not null
 where g.parent_id = $1::bigint
   and g.barrier = coalesce($2::bigint, (
       select max(y.barrier) from durable.gen_durable y where y.parent_id = $1::bigint and y.links is not null))
 order by g.id
