-- list_by_tags: the instances that have all of these tags, newest first. For people.
-- params   $1 tags text[] · $2 below this id bigint · $3 limit int
--          $4 status text or null · $5 machine text or null · $6 queue text or null
-- returns  id, newest first
-- locks    none
-- index    gen_durable_tags: an index of sets has no order, so the cost is that of all rows with these tags
-- plan     materialized: with the order in sight, a plan that knows no parameter would walk the primary key for a rare tag
with tagged as materialized (
    select g.id, g.status, g.fsm, g.queue from durable.gen_durable g where g.tags @> $1::text[]
)
select t.id
  from tagged t
 where t.id < $2::bigint
   and ($4::text is null or t.status = $4::text::durable.durable_status)
   and ($5::text is null or t.fsm = $5::text)
   and ($6::text is null or t.queue = $6::text)
 order by t.id desc limit $3::int
