-- find_untold: note instances of which their dependents were not told, and nothing would tell them. A trigger notes every end; a hand that
--          deletes a row, a session without triggers or a restored backup may not.
-- params   $1 after this id bigint · $2 how many rows of `graph` to look at int · $3 note them, or only look boolean
-- returns  first the last id that was looked at, or null at the end; then the ids of those
-- locks    none
-- index    graph_pkey, gen_durable_pkey, untold_pkey
-- keeps    exactly once per end and dependent: whoever tells asks `owed` and `told_at` again, under the lock of their row
with page as materialized (
    select e.id, e.owed, e.told_at from durable.graph e where e.id > $1::bigint order by e.id limit $2::int
), lost as materialized (
    select p.id
      from page p
      left join durable.gen_durable g on g.id = p.id
     where p.owed is not null and (g.id is null or (g.finished_at is not null and p.told_at is distinct from g.finished_at))
       and not exists (select 1 from durable.untold u where u.id = p.id)
), noted as (
    insert into durable.untold (id) select l.id from lost l where $3::boolean
)
select case when count(*) = $2::int then max(p.id) end from page p
union all
(select l.id from lost l order by l.id)
