-- list_by_key: the instances that have or had a unique key, newest first. For people.
-- params   $1 key bytea · $2 below this id bigint · $3 limit int
--          $4 status text or null · $5 machine text or null · $6 queue text or null · $7 tags text[] or null
-- returns  id, newest first
-- locks    none
-- index    gen_durable_key_history
select g.id
  from durable.gen_durable g
 where g.unique_key = $1::bytea and g.id < $2::bigint
   and ($4::text is null or g.status = $4::text::durable.durable_status)
   and ($5::text is null or g.fsm = $5::text)
   and ($6::text is null or g.queue = $6::text)
   and ($7::text[] is null or g.tags @> $7::text[])
 order by g.id desc limit $3::int
