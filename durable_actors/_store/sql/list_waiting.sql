-- list_waiting: the instances that wait for a person, newest first. For operators.
-- params   $1 what for: approval or pause text · $2 below this id bigint · $3 limit int
--          each may be null: $4 status text · $5 machine text · $6 queue text · $7 step text · $8 part of the error text
--          $9 tags text[] · $10 unchanged for so many seconds float8 · $11 what it waits for text · $12 paused bool
-- returns  id, newest first
-- locks    none
-- index    gen_durable_manual, backwards: only those that wait for a person
select g.id
  from durable.gen_durable g
 where g.status = 'awaiting_signal' and g.manual is not null and durable.waits_for(g.status, g.manual) = $1::text and g.id < $2::bigint
   and ($4::text is null or g.status = $4::text::durable.durable_status)
   and ($5::text is null or g.fsm = $5::text)
   and ($6::text is null or g.queue = $6::text)
   and ($7::text is null or g.step = $7::text)
   and ($8::text is null or strpos(g.last_error, $8::text) > 0)
   and ($9::text[] is null or g.tags @> $9::text[])
   and ($10::float8 is null or g.updated_at < durable.now() - make_interval(secs => $10::float8))
   and ($11::text is null or durable.waits_for(g.status, g.manual) = $11::text)
   and ($12::bool is null or durable.is_paused(g.status, g.hold, g.request) = $12::bool)
 order by g.id desc limit $3::int
