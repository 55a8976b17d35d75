-- find_long_journals: of the next rows by id, or of these, those of live instances whose journal has grown long. Retention.
-- params   $1 after this id bigint · $2 how many rows int · $3 moves bigint: an instance that has moved more often is long · $4 only these
--          ids bigint[], or null: the next ones
-- returns  one row: how many rows it looked at, the last of them, then ids as arrays: the long ones · those that have moved $3 times since
--          retention wrote their last snapshot · those that have records which may go
-- locks    none
-- index    gen_durable_pkey, checkpoints_pkey, journal_pkey
-- cost     no index has the long ones, and no commit pays for them: a walk along the primary key. A row that is not long costs no more
--          than to look at it, a long one two probes.
with looked as materialized (
    (select g.id, g.rev, g.journal, g.finished_at from durable.gen_durable g
      where $4::bigint[] is null and g.id > $1::bigint order by g.id limit $2::int)
    union all
    select g.id, g.rev, g.journal, g.finished_at from durable.gen_durable g where g.id = any ($4::bigint[])
), long as materialized (
    select l.id, l.journal > 1 and l.rev - greatest(coalesce(c.rev, 0), 0) >= $3::bigint as grown,
           exists (select 1 from durable.journal j
                    where j.instance_id = l.id and j.rev < durable.journal_cut(l.journal, l.rev, $3::bigint, c.projection)) as hides
      from looked l
      left join durable.checkpoints c on c.thread = 'snapshot of run:' || l.id
     where l.finished_at is null and l.journal between 1 and 4 and l.rev > $3::bigint
)
select (select count(*) from looked), (select max(l.id) from looked l), array_agg(x.id order by x.id),
       array_agg(x.id order by x.id) filter (where x.grown), array_agg(x.id order by x.id) filter (where x.hides)
  from long x
