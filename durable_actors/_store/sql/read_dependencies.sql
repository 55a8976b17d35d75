-- read_dependencies: what some instances come after, with results: `ctx.dependencies`.
-- params   $1 instances bigint[]
-- returns  per instance: id, what it comes after bigint[]. Then each of those once, after two nulls: id, key, machine, status, result,
--          last_error; what retention has deleted is missing
-- locks    none
-- index    graph_pkey, gen_durable_pkey
-- cost     what many come after is read once: 1,000 instances that come after the same 1,000 are 2,000 rows, not a million
with asked as materialized (
    select e.id, array_remove(e.needs, null) as needs from durable.graph e where e.id = any ($1::bigint[])
)
select a.id, a.needs, null::bigint, null::text, null::text, null::text, null::text, null::text from asked a
union all
select null, null, g.id, g.child_key, g.fsm, g.status::text, g.result::text, g.last_error
  from durable.gen_durable g
 where g.id = any (array(select distinct n.id from asked a cross join lateral unnest(a.needs) n(id)))
