-- read_instances: whole rows, for people.
-- params   $1 id bigint[] · $2 bool: with state, result and errors; they are null otherwise
-- returns  read.Instance
-- locks    none
-- index    gen_durable_pkey, graph_pkey
select g.id, g.fsm, g.fsm_version, g.step, g.status, g.queue, g.priority, g.attempt, g.crashes, g.visit,
       case when $2::bool then g.state end, case when $2::bool then g.result end, case when $2::bool then g.last_error end,
       g.partition_key, g.unique_key, g.parent_id, g.locked_by, g.eligible_at, g.lease_expires_at,
       g.inserted_at, g.updated_at, g.finished_at, g.hold,
       g.interruptions, case when $2::bool then g.error_type end, case when $2::bool then g.traceback end, g.tags,
       case when $2::bool then g.meta end,
       case when $2::bool then g.manual else durable.shown_manual(g.manual) end, g.await_deadline, g.request, g.rerun_of,
       case when $2::bool or jsonb_typeof(g.cancellation) <> 'object' then g.cancellation else g.cancellation - 'reason' end,
       g.child_key, case when g.hold in (4, 5) and g.links in (1, 3) then (select e.waits from durable.graph e where e.id = g.id) end, g.max_attempts
  from durable.gen_durable g
 where g.id = any ($1::bigint[])
 order by g.id
