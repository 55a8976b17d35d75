-- read_origins: who started these children: parent, step and key, as far as it is recorded. For inspect, show and tree.
-- params   $1 id bigint[]
-- returns  'child', per instance that has a parent: id, parent, barrier, the parent's machine (null: its row is gone), and from the child's
--          own first record step and key · 'told', what the records of those parents say whose children have no such record: the child, or
--          null for all of a barrier, the parent, the barrier, null, step, key. The caller joins them: on connections without hash joins a
--          join would be quadratic
-- locks    none
-- index    gen_durable_pkey, journal_pkey
-- cost     linear in the children, and in the histories of the parents whose children are not recorded
with child as materialized (
    select g.id, g.parent_id, g.barrier, coalesce(s.data -> 'parent' ->> 'machine', p.fsm) as machine,
           s.data -> 'parent' ->> 'step' as step, s.data -> 'parent' ->> 'key' as key
      from durable.gen_durable g
      left join durable.gen_durable p on p.id = g.parent_id
      left join lateral (select j.data from durable.journal j where j.instance_id = g.id order by j.rev limit 1) s on true
     where g.id = any ($1::bigint[]) and g.parent_id is not null
)
select 'child', c.id::text, c.parent_id, c.barrier, c.machine, c.step, c.key from child c
union all
select 'told', j.data -> 'child' ->> 'id', j.instance_id, case when j.kind = 'spawned' then j.visit + 1 end, null, j.step,
       j.data -> 'child' ->> 'key'
  from durable.journal j
 where j.instance_id = any (array(select distinct c.parent_id from child c where c.step is null))
   and (j.kind = 'spawned' or (j.kind = 'child_started' and j.data -> 'child' ->> 'id' = any (array(select c.id::text from child c))))
