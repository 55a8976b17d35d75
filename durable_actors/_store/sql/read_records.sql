-- read_records: a page of the history of an instance, and where its row stands, in one snapshot.
-- params   $1 instance bigint · $2 after this rev bigint · $3 limit int
-- returns  per record, in order: the row's rev and level, null without a row · the record's rev · the record as JSON. One row with
--          null in place of a record if there is none
-- locks    none
-- index    journal_pkey, gen_durable_pkey
select g.rev, g.journal, r.rev, row_to_json(r)
  from (select) here
  left join durable.gen_durable g on g.id = $1::bigint
  left join lateral (
      select j.instance_id, j.rev, j.at, j.kind, j.step, j.to_step, j.visit, j.attempt, j.claim_id, j.node, j.seconds, j.error, j.by,
             coalesce(j.data, '{}') as data
        from durable.journal j
       where j.instance_id = $1::bigint and j.rev > $2::bigint
       order by j.rev limit $3::int) r on true
 order by r.rev
