-- append_records: append records to the journal of an instance, if its head is the expected one. For imports and other stores' tests:
--          a move of a row records itself.
-- params   $1 instance bigint · $2 expected head bigint · $3 records jsonb: an array of objects with the columns of the journal, in
--          order; their instance and rev are ignored · $4 thread text: names the head that this statement keeps
-- returns  the new head; nothing if the head is another one
-- locks    the head's row. Two appends with one expected head meet at journal_pkey: the second is refused
-- index    journal_pkey, gen_durable_pkey, checkpoints_pkey
-- keeps    the head beside the records: without it a record that was deleted from the end would leave no trace
with head as materialized (
    select greatest(
               coalesce((select j.rev from durable.journal j where j.instance_id = $1::bigint order by j.rev desc limit 1), 0),
               coalesce((select g.rev from durable.gen_durable g where g.id = $1::bigint and g.journal >= 3), 0),
               coalesce((select c.rev from durable.checkpoints c where c.thread = $4::text), 0)) as rev
), given as materialized (
    select r.*, u.o from jsonb_array_elements($3::jsonb) with ordinality u(value, o)
     cross join lateral jsonb_populate_record(null::durable.journal, u.value) r
), appended as (
    insert into durable.journal (instance_id, rev, at, visit, seconds, claim_id, attempt, kind, step, to_step, node, by, error, data)
    select $1::bigint, $2::bigint + i.o, i.at, i.visit, i.seconds, i.claim_id, i.attempt, i.kind, i.step, i.to_step, i.node, i.by,
           nullif(i.error, 'null'), nullif(i.data, '{}')
      from given i where (select h.rev from head h) = $2::bigint
)
insert into durable.checkpoints as c (thread, rev, format, projection)
select $4::text, $2::bigint + (select count(*) from given), 0, 'null' from head h where h.rev = $2::bigint
on conflict (thread) do update set rev = excluded.rev, at = excluded.at
returning c.rev
