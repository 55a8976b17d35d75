-- group_failures: the newest failed instances, grouped by machine, step and error. For the dashboard.
-- params   $1 window int (failed rows looked at) · $2 limit int (groups)
-- returns  fsm, step, error_type · a part of last_error that all of the group have: the class, or the text up to its first digit, line or
--          quote · how many · the first and the last end · versions int[] · the newest id · the start of its error · and in every row:
--          how many rows were looked at, how many groups there are. The largest group first.
-- locks    none
-- index    gen_durable_failed, backwards: the cost is the window's, whatever the table's size; then gen_durable_pkey for the newest of each
with win as materialized (
    select g.id, g.fsm, g.fsm_version, g.step, g.finished_at, left(g.error_type, 300) as error_type,
           case when strpos(g.last_error, left(g.error_type, 300)) > 0 then left(g.error_type, 300)
                else coalesce(nullif(left(substring(g.last_error from '^[^0-9"\n]*'), 100), ''), left(split_part(g.last_error, E'\n', 1), 100))
           end as part
      from durable.gen_durable g where g.status = 'failed' order by g.id desc limit $1::int
), groups as materialized (
    select w.fsm, w.step, w.error_type, w.part, count(*) as n, min(w.finished_at) as first, max(w.finished_at) as last,
           array_agg(distinct w.fsm_version) as versions, max(w.id) as newest
      from win w group by w.fsm, w.step, w.error_type, w.part
)
select c.fsm, c.step, c.error_type, c.part, c.n, c.first, c.last, c.versions,
       c.newest, (select left(g.last_error, 1000) from durable.gen_durable g where g.id = c.newest),
       (select count(*) from win), (select count(*) from groups)
  from groups c
 order by c.n desc, c.newest desc limit $2::int
