-- read_journaled: the next instances that are recorded, each with its row and the beginning of its history, in one snapshot.
-- params   $1 after this id bigint · $2 limit int · $3 machine text or null: of this one only · $4 share of them float8, or null: all ·
--          $5 only these ids bigint[], or null · $6 records of each int · $7 bytes of the records of each int · $8 bytes of all int: as the
--          server stores them, compressed
-- returns  id, the row as JSON, how many records follow, a JSON array of them; $6 and null if these records have more than $7 bytes. Fewer
--          instances than $2 if all have more than $8 bytes, but at least one
-- locks    none
-- index    gen_durable_pkey, journal_pkey
-- cost     reads rows that are not recorded, too, until $2 are found: one probe of journal_pkey for each. Sizes are
--          those of level full, whose records have states; to add them up reads no state, and adds a third to the cost
with page as materialized (
    select g.id, coalesce(pg_column_size(g.state), 0) + coalesce(pg_column_size(g.result), 0) as size, g.journal >= 4 as is_full
      from durable.gen_durable g
     where g.id > $1::bigint and ($5::bigint[] is null or g.id = any ($5::bigint[])) and ($3::text is null or g.fsm = $3::text)
       and ($4::float8 is null or random() < $4::float8)
       and (g.journal > 0 or exists (select 1 from durable.journal j where j.instance_id = g.id))
     order by g.id limit $2::int
), sized as materialized (
    select p.id, s.size, row_number() over (order by p.id) as nth, sum(p.size + least(s.size, $7::int)) over (order by p.id) as total
      from page p
     cross join lateral (
         select coalesce(sum(pg_column_size(r.data)), 0) as size from (
             select j.data from durable.journal j where p.is_full and j.instance_id = p.id limit $6::int) r) s
)
select g.id, row_to_json(g), case when p.size > $7::int then $6::int else h.count end, h.records
  from sized p
  join durable.gen_durable g on g.id = p.id
 cross join lateral (
     select count(*), json_agg(r) as records from (
         select j.instance_id, j.rev, j.at, j.kind, j.step, j.to_step, j.visit, j.attempt, j.claim_id, j.node, j.seconds, j.error, j.by,
                coalesce(j.data, '{}') as data
           from durable.journal j where p.size <= $7::int and j.instance_id = p.id order by j.rev limit $6::int) r) h
 where p.nth = 1 or p.total <= $8::int
 order by g.id
