-- find_lost_by_key: of the next instances that have records, those without a row that had this unique key. Their first record says so.
-- params   $1 key text, as the records have it: \x and hexadecimal digits · $2 after this id bigint · $3 how many instances to look at int
-- returns  first the last instance that was looked at, or null at the end; then the lost ones
-- locks    none
-- index    journal_pkey (one probe per instance), gen_durable_pkey
-- cost     no index has the keys of rows that are gone: two probes per recorded instance, 50 ms for 5,000. For repairs only.
with recursive i(id) as (
    (select j.instance_id from durable.journal j where j.instance_id > $2::bigint order by j.instance_id limit 1)
    union all
    select (select j.instance_id from durable.journal j where j.instance_id > i.id order by j.instance_id limit 1)
      from i where i.id is not null
), looked as materialized (
    select p.id from (select i.id from i limit $3::int) p where p.id is not null
)
(select case when count(*) = $3::int then max(l.id) end from looked l)
union all
(select l.id from looked l
  where not exists (select 1 from durable.gen_durable g where g.id = l.id)
    and (select j.data -> 'row' ->> 'unique_key' from durable.journal j where j.instance_id = l.id order by j.rev limit 1) = $1::text)
