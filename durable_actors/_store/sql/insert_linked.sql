-- insert_linked: like insert_plain, for children that come after each other.
-- params   as there: $1 fsm text[] · $2 version int[] · $3 step text[] · $4 state text[] · $5 queue text[] · $6 priority smallint[] ·
--          $7 partition_key text[] · $8 eligible_at timestamptz[] · $9 delay float8[] · $10 parent bigint · $11 barrier bigint ·
--          $12 journal level smallint[]; $13 key text[] · $14 links smallint[] (1 it comes after others, 2 others come after it, 3 both), each with an
--          element per row, or empty: null for all
-- returns  per input row, in input order: id
-- moves    started
-- locks    the new rows
-- plan     as there
-- cost     8 µs a row, insert_instances 11.6. Two columns more in insert_plain would cost every other insert
insert into durable.gen_durable (fsm, fsm_version, step, state, queue, priority, partition_key, eligible_at, parent_id, barrier, journal,
                                 child_key, links, hold)
select coalesce(i.fsm, ($1::text[])[1]), coalesce(i.version, ($2::int[])[1]), coalesce(i.step, ($3::text[])[1]),
       i.state::jsonb, coalesce(i.queue, ($5::text[])[1]), coalesce(i.priority, ($6::smallint[])[1]), i.partition_key,
       coalesce(i.at, durable.now() + make_interval(secs => coalesce(i.delay, 0))), $10::bigint, $11::bigint,
       coalesce(i.level, ($12::smallint[])[1]), i.child_key, i.links, case when i.links in (1, 3) then 5 else 0 end
  from unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::timestamptz[],
              $9::float8[], $12::smallint[], $13::text[], $14::smallint[])
       i(fsm, version, step, state, queue, priority, partition_key, at, delay, level, child_key, links)
returning id
