-- insert_plain: insert many instances in one statement, none of which has a unique key, tags, meta, a limit of attempts or a record of its start.
-- params   arrays, one element per instance: $1 fsm text[] · $2 version int[] · $3 step text[] · $4 state text[] · $5 queue text[]
--          $6 priority smallint[] · $7 partition_key text[] · $8 eligible_at timestamptz[] or null · $9 delay float8[] seconds or null;
--          $10 parent bigint · $11 barrier bigint · $12 journal level smallint[]. An array of one element, but for the states: the same for all. An empty one: null.
-- returns  per input row, in input order: id
-- moves    started
-- locks    the new rows
-- plan     one scan of the arrays: rows are inserted, ids drawn and returned in their order
-- cost     8 µs a row, a bare INSERT of the same rows 8.5, insert_instances 11.6: it inserts speculatively, for its keys' sake,
--          and keeps its input to tell which rows were duplicates. Arrays that say the same for all rows cost 0.6 to read.
insert into durable.gen_durable (fsm, fsm_version, step, state, queue, priority, partition_key, eligible_at, parent_id, barrier, journal)
select coalesce(i.fsm, ($1::text[])[1]), coalesce(i.version, ($2::int[])[1]), coalesce(i.step, ($3::text[])[1]),
       i.state::jsonb, coalesce(i.queue, ($5::text[])[1]), coalesce(i.priority, ($6::smallint[])[1]), i.partition_key,
       coalesce(i.at, durable.now() + make_interval(secs => coalesce(i.delay, 0))), $10::bigint, $11::bigint,
       coalesce(i.level, ($12::smallint[])[1])
  from unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::timestamptz[],
              $9::float8[], $12::smallint[])
       i(fsm, version, step, state, queue, priority, partition_key, at, delay, level)
returning id
