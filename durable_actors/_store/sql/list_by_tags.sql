-- list_by_tags: the instances that have all of these tags, newest first. For operators.
-- params   $1 tags text[] · $2 below this id bigint · $3 limit int
--          each may be null: $4 status text · $5 machine text · $6 queue text · $7 step text · $8 part of the error text
--          $9 tags text[] · $10 unchanged for so many seconds float8 · $11 what it waits for text · $12 paused bool
-- returns  id, newest first
-- locks    none
-- index    gen_durable_tags: an index of sets has no order, so the cost is that of all rows with these tags
-- plan     materialized: with the order in sight, a plan that knows no parameter would walk the primary key for a rare tag
with tagged as materialized (
    select g.id, g.status, g.fsm, g.queue, g.step, g.tags, g.updated_at, case when $8::text is not null then g.last_error end as last_error,
           case when $11::text is not null then durable.waits_for(g.status, g.manual) end as waiting,
           case when $12::bool is not null then durable.is_paused(g.status, g.hold, g.request) end as paused
      from durable.gen_durable g where g.tags @> $1::text[]
)
select t.id
  from tagged t
 where t.id < $2::bigint
   and ($4::text is null or t.status = $4::text::durable.durable_status)
   and ($5::text is null or t.fsm = $5::text)
   and ($6::text is null or t.queue = $6::text)
   and ($7::text is null or t.step = $7::text)
   and ($8::text is null or strpos(t.last_error, $8::text) > 0)
   and ($9::text[] is null or t.tags @> $9::text[])
   and ($10::float8 is null or t.updated_at < durable.now() - make_interval(secs => $10::float8))
   and ($11::text is null or t.waiting = $11::text)
   and ($12::bool is null or t.paused = $12::bool)
 order by t.id desc limit $3::int
