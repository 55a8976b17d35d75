-- start_child: insert an instance from inside a step, once: its identity is `uid`, and a re-run finds the same one.
-- params   $1 caller bigint · $2 claim uuid · $3 visit bigint · $4 uid uuid · $5 fsm text · $6 version int · $7 step text
--          $8 state text · $9 queue text · $10 priority smallint · $11 partition key text · $12 unique key bytea · $13 scope text
--          $14 eligible_at timestamptz or null · $15 delay float8 · $16 as a child boolean · $17 tags text[] or null · $18 meta text or null
--          $19 digest of its arguments bytea or null · $20 its key text · $21 journal level smallint · $22 fingerprint text (hexadecimal) or null
--          $23 max_attempts int or null · $24 fair key text or null · $25 limits text or null
-- returns  id, whether it is new, who occupies its unique key, as far as the snapshot sees it, and whether one of the same
--          identity was started with other arguments (rows of the first release have no digest: not known to differ); nothing
--          when the caller's claim is stale. An id of null: the key is occupied, or a concurrent call of this very step has just inserted it.
-- moves    started · child_started
-- locks    the caller's row, so that a worker that lost its claim starts nothing; its rev counts the child
-- index    gen_durable_pkey, gen_durable_child_uid, gen_durable_unique
-- keeps    I4
with caller as materialized (
    select g.id, g.fsm, g.step from durable.gen_durable g
     where g.id = $1::bigint and g.claim_id = $2::uuid and g.visit = $3::bigint and g.locked_by is not null
       for no key update
), known as materialized (
    select g.id, g.child_args from durable.gen_durable g where g.child_uid = $4::uuid
), started as (
    insert into durable.gen_durable (fsm, fsm_version, step, state, queue, priority, partition_key, unique_key, unique_scope,
                                     eligible_at, parent_id, child_uid, tags, meta, child_args, journal, fingerprint, max_attempts, fair_key, rate_limit)
    select $5::text, $6::int, $7::text, $8::jsonb, $9::text, $10::smallint, $11::text, $12::bytea,
           $13::durable.durable_status[], coalesce($14::timestamptz, durable.now() + make_interval(secs => $15::float8)),
           case when $16::boolean then caller.id end, $4::uuid, $17::text[], $18::text::jsonb, $19::bytea, $21::smallint,
           decode($22::text, 'hex'), $23::int, $24::text, $25::text
      from caller where not exists (select 1 from known)
    on conflict do nothing
    returning id, case when journal >= 2 then durable.note(
        id, rev, 'started', step, step, visit, attempt, 0, further => jsonb_build_object('row', jsonb_strip_nulls(jsonb_build_object(
            'fsm', fsm, 'fsm_version', fsm_version, 'step', step, 'queue', queue, 'priority', priority, 'journal', journal,
            'eligible_at', eligible_at, 'partition_key', partition_key, 'unique_key', unique_key, 'unique_scope', unique_scope,
            'parent_id', parent_id, 'child_uid', child_uid, 'child_args', child_args, 'tags', tags, 'inserted_at', inserted_at,
            'fingerprint', fingerprint, 'max_attempts', max_attempts, 'fair_key', fair_key, 'rate_limit', rate_limit))
            || case when meta is null then '{}' else jsonb_build_object('meta', meta) end
            || case when journal < 4 then '{}' else jsonb_build_object('state', state) end)
            || case when parent_id is null then '{}' else jsonb_build_object('parent', (
                select jsonb_build_object('id', c.id, 'machine', c.fsm, 'step', c.step, 'key', $20::text) from caller c)) end) end
), lineage as (
    -- Its own statement's lock: no other write of this row can come between.
    update durable.gen_durable g set rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where $16::boolean and g.id = (select caller.id from caller) and exists (select 1 from started)
    returning case when g.journal >= 2 then durable.note(
                  g.id, g.rev, 'child_started', g.step, null, g.visit, g.attempt, g.round, g.claim_id, g.locked_by,
                  further => jsonb_build_object('child', jsonb_strip_nulls(jsonb_build_object(
                      'id', (select s.id from started s), 'machine', $5::text, 'step', $7::text, 'key', $20::text))
                          || case when $18::text is null then '{}' else jsonb_build_object('meta', $18::text::jsonb) end)
                      || case when g.journal < 3 then '{"folded": {}}'::jsonb else '{}' end) end
)
select coalesce((select k.id from known k), (select s.id from started s)), exists (select 1 from started),
       (select g.id from durable.gen_durable g where g.unique_guard = $12::bytea),
       exists (select 1 from known k where k.child_args <> $19::bytea)
  from caller
