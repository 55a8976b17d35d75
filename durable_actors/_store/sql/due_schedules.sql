-- due_schedules: the schedules that have something to do now, and when to look again.
-- params   $1 the names that this node's code has text[] · $2 limit int
-- returns  first one row: null · now · seconds until the next one fires, or null · the names of enabled ones of some code, but not of this node's, as
--          JSON · the names of disabled ones of this node's code, as JSON; then per schedule: the row as JSON, without what is only inserted · now ·
--          the id of its last instance, if that has not ended
-- locks    none: turn_schedule compares the rev
-- index    gen_durable_unique; the table of schedules is small
-- plan     the instance is looked up by a scalar subquery, for the few rows that need it: a join may be hashed, and read all instances
with at as materialized (
    select durable.now() as now
)
select null::text, at.now, (
           select extract(epoch from min(case when s.buffered is null then s.fire_at else least(s.fire_at, at.now + interval '1 s') end) - at.now)::float8
             from durable.schedules s where s.paused is null and s.disabled_at is null),
       (select jsonb_agg(s.name)::text from durable.schedules s
         where s.origin = 'code' and s.disabled_at is null and s.name <> all ($1::text[])),
       (select jsonb_agg(s.name)::text from durable.schedules s
         where s.origin = 'code' and s.disabled_at is not null and s.name = any ($1::text[]))
  from at
union all
select d.* from (
    select (to_jsonb(s) - 'state' - 'meta' - 'tags')::text, at.now, (
               select g.id from durable.gen_durable g where g.unique_guard = convert_to('schedule:' || s.name, 'UTF8'))::float8, null, null
      from at cross join durable.schedules s
     where s.paused is null and s.disabled_at is null
       and (s.fire_at <= at.now or case when s.buffered is not null then (
               select g.id from durable.gen_durable g where g.unique_guard = convert_to('schedule:' || s.name, 'UTF8')) is null end)
     order by s.fire_at nulls last, s.name limit $2::int) d
