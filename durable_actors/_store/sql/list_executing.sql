-- list_executing: the newest instances whose step runs that pass the filters, among the next $2 of these below an id. For operators.
-- params   $1 below this id bigint · $2 window int (rows looked at) · $3 limit int
--          each may be null: $4 status text · $5 machine text · $6 queue text · $7 step text · $8 part of the error text
--          $9 tags text[] · $10 unchanged for so many seconds float8 · $11 what it waits for text · $12 paused bool
-- returns  id or null (none passed), newest first · how many rows were looked at · the lowest id of them
-- locks    none
-- index    gen_durable_executing, all of it: as many rows as the nodes have slots
-- plan     materialized: with the order in sight, a plan that knows no parameter would walk the primary key for few rows
with running as materialized (
    select g.* from durable.gen_durable g where g.status = 'executing'
), win as materialized (
    select g.id, g.status, g.fsm, g.queue, g.step, g.updated_at, case when $9::text[] is not null then g.tags end as tags,
           case when $8::text is not null then g.last_error end as last_error,
           case when $11::text is not null then durable.waits_for(g.status, g.manual) end as waiting,
           case when $12::bool is not null then durable.is_paused(g.status, g.hold, g.request) end as paused
      from running g where g.id < $1::bigint order by g.id desc limit $2::int
)
select f.id, w.looked, w.lowest
  from (select count(*) as looked, min(y.id) as lowest from win y) w
  left join (
    select y.id from win y
     where ($4::text is null or y.status = $4::text::durable.durable_status)
       and ($5::text is null or y.fsm = $5::text)
       and ($6::text is null or y.queue = $6::text)
       and ($7::text is null or y.step = $7::text)
       and ($8::text is null or strpos(y.last_error, $8::text) > 0)
       and ($9::text[] is null or y.tags @> $9::text[])
       and ($10::float8 is null or y.updated_at < durable.now() - make_interval(secs => $10::float8))
       and ($11::text is null or y.waiting = $11::text)
       and ($12::bool is null or y.paused = $12::bool)
     order by y.id desc limit $3::int) f on true
 order by f.id desc
