-- write_compensations: record which step the machines that a node knows enter when they are cancelled (`on_cancel`).
-- params   arrays, one element per machine: $1 name text[] · $2 version int[] · $3 step text[] (null: it has none) ·
--          $4 limits of that step text[]
-- returns  nothing
-- locks    the rows that change: usually none
-- index    compensations_pkey
-- keeps    a machine that no longer has such a step has no row; others are not touched, so that nodes need not know the same machines
with told as materialized (
    select u.fsm, u.version, u.step, u.limits from unnest($1::text[], $2::int[], $3::text[], $4::text[]) u(fsm, version, step, limits)
), gone as (
    delete from durable.compensations c
     where exists (select 1 from told t where t.fsm = c.fsm and t.version = c.fsm_version and t.step is null)
)
insert into durable.compensations as c (fsm, fsm_version, step, limits)
select t.fsm, t.version, t.step, t.limits from told t
 where t.step is not null and not exists (select 1 from durable.compensations o
                                           where o.fsm = t.fsm and o.fsm_version = t.version and o.step = t.step
                                             and o.limits is not distinct from t.limits)
 order by t.fsm, t.version
on conflict (fsm, fsm_version) do update set step = excluded.step, limits = excluded.limits
