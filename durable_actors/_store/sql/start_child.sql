-- start_child: insert an instance from inside a step, once: its identity is `uid`, and a re-run finds the same one.
-- params   $1 caller bigint · $2 claim uuid · $3 visit bigint · $4 uid uuid · $5 fsm text · $6 version int · $7 step text
--          $8 state text · $9 queue text · $10 priority smallint · $11 partition key text · $12 unique key bytea · $13 scope text
--          $14 eligible_at timestamptz or null · $15 delay float8 · $16 as a child boolean · $17 tags text[] or null · $18 meta text or null
--          $19 digest of its arguments bytea or null
-- returns  id, whether it is new, who occupies its unique key, as far as the snapshot sees it, and whether one of the same
--          identity was started with other arguments (rows of the first release have no digest: not known to differ); nothing
--          when the caller's claim is stale. An id of null: the key is occupied, or a concurrent call of this very step has just inserted it.
-- locks    the caller's row, so that a worker that lost its claim starts nothing
-- index    gen_durable_pkey, gen_durable_child_uid, gen_durable_unique
-- keeps    I4
with caller as materialized (
    select g.id from durable.gen_durable g
     where g.id = $1::bigint and g.claim_id = $2::uuid and g.visit = $3::bigint and g.locked_by is not null
       for no key update
), known as materialized (
    select g.id, g.child_args from durable.gen_durable g where g.child_uid = $4::uuid
), started as (
    insert into durable.gen_durable (fsm, fsm_version, step, state, queue, priority, partition_key, unique_key, unique_scope,
                                     eligible_at, parent_id, child_uid, tags, meta, child_args)
    select $5::text, $6::int, $7::text, $8::jsonb, $9::text, $10::smallint, $11::text, $12::bytea,
           $13::durable.durable_status[], coalesce($14::timestamptz, now() + make_interval(secs => $15::float8)),
           case when $16::boolean then caller.id end, $4::uuid, $17::text[], $18::text::jsonb, $19::bytea
      from caller where not exists (select 1 from known)
    on conflict do nothing
    returning id
)
select coalesce((select k.id from known k), (select s.id from started s)), exists (select 1 from started),
       (select g.id from durable.gen_durable g where g.unique_guard = $12::bytea),
       exists (select 1 from known k where k.child_args <> $19::bytea)
  from caller
