-- list_claims: what a node runs or has claimed, for people: the longest held first.
-- params   $1 incarnation text · $2 limit int
-- returns  id, fsm, fsm_version, step, queue, attempt, updated_at (when it was claimed, or its step began), lease_expires_at
-- locks    none
-- index    gen_durable_executing
select g.id, g.fsm, g.fsm_version, g.step, g.queue, g.attempt, g.updated_at, g.lease_expires_at
  from durable.gen_durable g
 where g.status = 'executing' and g.locked_by = $1::text
 order by g.updated_at limit $2::int
