-- import_records: write the history of an instance that this database does not have.
-- params   $1 instance bigint · $2 records jsonb: an array of objects with the columns of the journal; their instance is ignored
-- returns  how many records were written: none if a row or a record of the instance exists
-- locks    the new records. The sequence of ids goes on after this one, if it is behind: import while nobody inserts
-- index    journal_pkey, gen_durable_pkey
with given as materialized (
    select r.* from jsonb_array_elements($2::jsonb) u(value) cross join lateral jsonb_populate_record(null::durable.journal, u.value) r
     where not exists (select 1 from durable.journal j where j.instance_id = $1::bigint)
       and not exists (select 1 from durable.gen_durable g where g.id = $1::bigint)
), written as (
    insert into durable.journal (instance_id, rev, at, visit, seconds, claim_id, attempt, kind, step, to_step, node, by, error, data)
    select $1::bigint, i.rev, i.at, i.visit, i.seconds, i.claim_id, i.attempt, i.kind, i.step, i.to_step, i.node, i.by,
           nullif(i.error, 'null'), nullif(i.data, '{}')
      from given i
    returning rev
)
select count(*), case when $1::bigint > (select s.last_value from durable.gen_durable_id_seq s) and count(*) > 0
                      then setval('durable.gen_durable_id_seq', $1::bigint) end
  from written
