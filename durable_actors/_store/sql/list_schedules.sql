-- list_schedules: schedules as they stand, each with its last records.
-- params   $1 their names text[], or null for all · $2 how many records int
-- returns  the row as JSON, without the state · now · the id of its last instance, if that has not ended · its records as JSON, newest first
-- locks    none
-- plan     the instance is looked up by a scalar subquery: a join may be hashed, and read all instances
-- index    schedules_pkey, schedule_log_pkey, gen_durable_unique
select (to_jsonb(s) - 'state')::text, durable.now(),
       (select g.id from durable.gen_durable g where g.unique_guard = convert_to('schedule:' || s.name, 'UTF8')),
       (select coalesce(jsonb_agg(to_jsonb(l) order by l.id desc), '[]')::text from (
            select k.* from durable.schedule_log k where k.name = s.name order by k.id desc limit $2::int) l)
  from durable.schedules s
 where $1::text[] is null or s.name = any ($1::text[])
 order by s.name
