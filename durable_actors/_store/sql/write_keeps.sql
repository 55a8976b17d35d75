-- write_keeps: record what the machines that a node knows say about how long their ended instances are kept.
-- params   arrays, one element per machine: $1 name text[] · $2 version int[] · $3 whether it says something boolean[] · $4 seconds
--          float8[] (null: for ever)
-- returns  nothing
-- locks    the rows that change: usually none
-- index    keeps_pkey
-- keeps    a machine that no longer says anything has no row; others are not touched, so that nodes need not know the same machines
with told as materialized (
    select u.fsm, u.version, u.says, u.seconds from unnest($1::text[], $2::int[], $3::boolean[], $4::float8[]) u(fsm, version, says, seconds)
), silent as (
    delete from durable.keeps k
     where exists (select 1 from told t where t.fsm = k.fsm and t.version = k.fsm_version and not t.says)
)
insert into durable.keeps as k (fsm, fsm_version, seconds)
select t.fsm, t.version, t.seconds from told t
 where t.says and not exists (select 1 from durable.keeps o
                               where o.fsm = t.fsm and o.fsm_version = t.version and o.seconds is not distinct from t.seconds)
 order by t.fsm, t.version
on conflict (fsm, fsm_version) do update set seconds = excluded.seconds
