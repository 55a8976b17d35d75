-- delete_ended: look at the next rows by id, and delete those that ended long enough ago, with all that belongs to them. Never waits.
-- params   $1 after this id bigint · $2 how many rows int · seconds for which a row is kept after its end, null: for ever: $3 done
--          float8 · $4 cancelled float8 · $5 failed float8; what its machine says (durable.keeps) goes before $3 and $4, and $5 may be longer ·
--          $6 the least for what a step inserted float8 · $7 seconds since its insert that make a row old float8 · $8 delete, or only
--          look boolean
-- returns  one row: how many rows it looked at, the last of them, the last old one, how many it deleted of each status (done, cancelled,
--          failed), how many records of the journal; then null
-- moves    deleted
-- locks    FOR UPDATE SKIP LOCKED on the rows, in id order; then their signals, records and checkpoints, which nobody else may write
-- index    gen_durable_pkey, also for the parents; graph_pkey, signals_unread, signals_dedup, journal_pkey
-- keeps    live rows; what a live row comes after (`ctx.dependencies`); rows that occupy a unique key; children that their parent may still read, or find again: a parent that is not done,
--          and may be retried, has those of its current barrier and those that it started (`ctx.start_child`). What a step inserted
--          (`ctx.insert`) names no parent: it is found by its child_uid when the step runs again, hence $6. Receipts.
--          A row that was retried after this statement began has another finished_at, or none.
-- cost     no index is needed for finished rows, so ending a row costs no more: a row that ended before a time was inserted before it,
--          and ids are given in about that order. The caller walks along the ids and stops where nothing is old ($7).
with looked as materialized (
    select g.id, g.inserted_at, g.finished_at, g.status, g.fsm, g.fsm_version, g.unique_guard is not null as occupies,
           g.child_uid is not null and g.parent_id is null as inserted
      from durable.gen_durable g
     where g.id > $1::bigint order by g.id limit $2::int
), ripe as materialized (
    select a.id, a.finished_at from (
        select l.id, l.finished_at,
               greatest(case when l.status = 'failed' then case when $5::float8 is null or (k.fsm is not null and k.seconds is null) then 'infinity'
                                                                else greatest($5::float8, k.seconds) end
                             when k.fsm is not null then coalesce(k.seconds, 'infinity')
                             when l.status = 'done' then coalesce($3::float8, 'infinity')
                             else coalesce($4::float8, 'infinity') end,
                        case when l.inserted then $6::float8 end) as age
          from looked l
          left join durable.keeps k on k.fsm = l.fsm and k.fsm_version = l.fsm_version
         where l.finished_at is not null and not l.occupies and $8::boolean) a
     -- "least": a row of durable.keeps that a hand has written must not end every walk with an overflow.
     where a.age < 'infinity' and a.finished_at <= durable.now() - make_interval(secs => least(a.age, 1e10))
), locked as materialized (
    select g.id, g.parent_id, g.barrier, g.links
      from ripe r
      join durable.gen_durable g on g.id = r.id
     where g.finished_at = r.finished_at and g.unique_guard is null
     order by g.id for update of g skip locked
), gone as (
    delete from durable.gen_durable g
     where g.id = any (array(
        select l.id from locked l
         where (l.parent_id is null or not exists (
             select 1 from durable.gen_durable p
              where p.id = l.parent_id and p.status <> 'done' and (l.barrier is null or l.barrier >= p.visit)
                and p.id not in (select x.id from locked x where x.parent_id is null)))
           and (l.links is null or not exists (
               select 1 from durable.graph e join durable.gen_durable d on d.id = any (e.feeds)
                where e.id = l.id and d.finished_at is null))))
    returning g.id, g.status, g.journal, g.links
)
select (select count(*) from looked), (select max(l.id) from looked l),
       (select max(l.id) from looked l where l.inserted_at <= durable.now() - make_interval(secs => $7::float8)),
       count(*) filter (where x.status = 'done'), count(*) filter (where x.status = 'cancelled'), count(*) filter (where x.status = 'failed'),
       case when bool_or(x.journal > 0) then durable.forget(array_agg(x.id order by x.id) filter (where x.journal > 0)) else 0 end,
       case when bool_or(x.links is not null) then durable.forget_graphs(array_agg(x.id) filter (where x.links is not null)) end
  from gone x
