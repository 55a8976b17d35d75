-- insert_held: like insert_plain, for rows of which some are held behind an earlier one of their partition key in the same insert.
-- params   $1 to $12 as insert_plain: arrays, one element per instance: $1 fsm text[] · $2 version int[] · $3 step text[] · $4 state text[] ·
--          $5 queue text[] · $6 priority smallint[] · $7 partition_key text[] · $8 eligible_at timestamptz[] or null · $9 delay float8[]
--          seconds or null; $10 parent bigint · $11 barrier bigint · $12 journal level smallint[]; $13 hold smallint[]: 1 for a row behind
--          one of this statement that has the same key, queue, machine, version, step and priority, and is due, as it is; else 0
-- returns  per input row, in input order: id
-- moves    started
-- locks    the new rows
-- plan     as insert_plain
-- keeps    I7 no wake-up is lost: a row is held only behind one that is on offer and becomes visible in the same instant. Whoever takes that
--          one off offer, in whatever way, comes after this commit, and the promotion that follows sees what is held here. What may pick
--          the first may pick the others, so no node passes the first by and leaves them held
-- cost     insert_plain's. A held row is not in the index of the pick; the pick would read it there, and write it once more to hold it
insert into durable.gen_durable (fsm, fsm_version, step, state, queue, priority, partition_key, eligible_at, parent_id, barrier, journal, hold)
select coalesce(i.fsm, ($1::text[])[1]), coalesce(i.version, ($2::int[])[1]), coalesce(i.step, ($3::text[])[1]),
       i.state::jsonb, coalesce(i.queue, ($5::text[])[1]), coalesce(i.priority, ($6::smallint[])[1]), i.partition_key,
       coalesce(i.at, durable.now() + make_interval(secs => coalesce(i.delay, 0))), $10::bigint, $11::bigint,
       coalesce(i.level, ($12::smallint[])[1]), i.hold
  from unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::timestamptz[],
              $9::float8[], $12::smallint[], $13::smallint[])
       i(fsm, version, step, state, queue, priority, partition_key, at, delay, level, hold)
returning id
