-- insert_instances: insert many instances in one statement; duplicates of an occupied unique key are left out.
-- params   arrays, one element per instance: $1 fsm text[] · $2 version int[] · $3 step text[] · $4 state text[] · $5 queue text[]
--          $6 priority smallint[] · $7 partition_key text[] · $8 unique_key bytea[] · $9 scope text[] (an enum array's literal)
--          $10 eligible_at timestamptz[] or null · $11 delay float8[] seconds or null · $12 parent bigint[] or null · $13 barrier bigint[]
--          $14 tags text[] (an array's literal, or null) · $15 meta text[] (JSON, or null) · $16 journal level smallint[]
--          $17 fingerprint text[] (hexadecimal), or empty: null for all · of children in a graph, else empty: $18 key text[] ·
--          $19 links smallint[] (1 it comes after others, 2 others come after it, 3 both) · $20 max_attempts int[] · $21 fair key text[]
--          $22 limits text[], or empty: null for all
-- returns  per input row, in input order: id or null when deduplicated · the id that occupies the key, as far as the
--          snapshot sees it
-- moves    started
-- locks    the new rows; keys in key order, so that two batches cannot wait for each other
-- index    gen_durable_unique, gen_durable_pkey
-- plan     what was inserted is found by a hashed subplan. As a join it is quadratic on connections without hash and merge
--          joins (a node with few connections): 8.2 s for 10,000 rows, now 0.4 s.
-- keeps    I10 unique keys are unique within their scope. Ids are drawn in input order, the first of equal keys wins.
--          The record has the key in hexadecimal digits, whatever `bytea_output` and `standard_conforming_strings` the caller has.
with input as materialized (
    select nextval('durable.gen_durable_id_seq') as id, u.* from (
        select * from unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::bytea[],
                             $9::text[], $10::timestamptz[], $11::float8[], $12::bigint[], $13::bigint[], $14::text[], $15::text[],
                             $16::smallint[], $17::text[], $18::text[], $19::smallint[], $20::int[], $21::text[], $22::text[])
             with ordinality
             i(fsm, version, step, state, queue, priority, partition_key, unique_key, scope, at, delay, parent, barrier, tags, meta, level,
               definition, child_key, links, max_attempts, fair_key, limits, ord)
         order by ord) u
), inserted as (
    insert into durable.gen_durable (id, fsm, fsm_version, step, state, queue, priority, partition_key, unique_key,
                                     unique_scope, eligible_at, parent_id, barrier, tags, meta, journal, fingerprint, hold, child_key, links,
                                     max_attempts, fair_key, rate_limit)
    overriding system value
    select id, fsm, version, step, state::jsonb, queue, priority, partition_key, unique_key,
           scope::durable.durable_status[], coalesce(at, durable.now() + make_interval(secs => coalesce(delay, 0))), parent, barrier,
           tags::text[], meta::jsonb, level, decode(definition, 'hex'), case when links in (1, 3) then 5 else 0 end, child_key, links,
           max_attempts, fair_key, limits
      from input order by unique_key nulls first, id
    on conflict (unique_guard) where unique_guard is not null do nothing
    returning id
), started as (
    insert into durable.journal (instance_id, rev, visit, attempt, kind, step, to_step, data)
    select i.id, 1, 1, 0, 'started', i.step, i.step,
           jsonb_build_object('row', jsonb_strip_nulls(jsonb_build_object(
               'fsm', i.fsm, 'fsm_version', i.version, 'step', i.step, 'queue', i.queue, 'priority', i.priority, 'journal', i.level,
               'eligible_at', coalesce(i.at, durable.now() + make_interval(secs => coalesce(i.delay, 0))),
               'partition_key', i.partition_key, 'unique_key', chr(92) || 'x' || encode(i.unique_key, 'hex'),  -- whatever bytea_output is
               'unique_scope', i.scope::durable.durable_status[], 'parent_id', i.parent, 'barrier', i.barrier, 'tags', i.tags::text[],
               'inserted_at', durable.now(), 'fingerprint', chr(92) || 'x' || i.definition, 'child_key', i.child_key, 'links', i.links,
               'fair_key', i.fair_key, 'rate_limit', i.limits,
               'hold', case when i.links in (1, 3) then 5 end, 'max_attempts', i.max_attempts))
               || case when i.meta is null then '{}' else jsonb_build_object('meta', i.meta::jsonb) end
               || case when i.level < 4 then '{}' else jsonb_build_object('state', i.state::jsonb) end)
           || case when i.parent is null then '{}' else jsonb_build_object('parent', (
               -- The statement's transaction has locked it, and it is still in the step that spawns.
               select jsonb_build_object('id', p.id, 'machine', p.fsm, 'step', p.step) from durable.gen_durable p where p.id = i.parent)) end
      from input i where i.level >= 2 and i.id in (select n.id from inserted n)
)
select case when o.new then o.id end,
       case when not o.new then (
           select g.id from durable.gen_durable g where g.unique_guard = o.unique_key) end
  from (select input.*, input.id in (select i.id from inserted i) as new from input offset 0) o
 order by o.ord
