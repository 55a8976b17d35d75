-- read_instances: whole rows, for people.
-- params   $1 id bigint[]
-- returns  read.Instance
-- locks    none
-- index    gen_durable_pkey
select g.id, g.fsm, g.fsm_version, g.step, g.status, g.queue, g.priority, g.attempt, g.crashes, g.visit, g.state, g.result,
       g.last_error, g.partition_key, g.unique_key, g.parent_id, g.locked_by, g.eligible_at, g.lease_expires_at,
       g.inserted_at, g.updated_at, g.finished_at, g.hold,
       g.interruptions, g.error_type, g.traceback, g.tags, g.meta
  from durable.gen_durable g
 where g.id = any ($1::bigint[])
 order by g.id
