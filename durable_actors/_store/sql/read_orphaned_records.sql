-- read_orphaned_records: instances that have records and no row.
-- params   $1 after this id bigint · $2 how many instances to look at int · $3 only these ids bigint[], or null
-- returns  id, whether it has a row, the revision of its last record; all that were looked at, in order, so that the caller can go on
--          after the last
-- locks    none
-- index    journal_pkey (one probe per instance), gen_durable_pkey
with recursive i(id) as (
    (select j.instance_id from durable.journal j
      where j.instance_id > $1::bigint and ($3::bigint[] is null or j.instance_id = any ($3::bigint[])) order by j.instance_id limit 1)
    union all
    select (select j.instance_id from durable.journal j
             where j.instance_id > i.id and ($3::bigint[] is null or j.instance_id = any ($3::bigint[])) order by j.instance_id limit 1)
      from i where i.id is not null
)
select p.id, exists (select 1 from durable.gen_durable g where g.id = p.id),
       (select j.rev from durable.journal j where j.instance_id = p.id order by j.rev desc limit 1)
  from (select i.id from i limit $2::int) p where p.id is not null
