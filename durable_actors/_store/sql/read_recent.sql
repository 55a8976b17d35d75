-- read_recent: how many of the newest instances have failed, and how many were done in the last seconds, by queue. For operators.
-- params   $1 how many instances int · $2 seconds float8
-- returns  queue, how many of its instances are among them, done in the last $2 seconds, failed
-- locks    none
-- index    gen_durable_pkey, from its end: the cost is that of $1 rows, whatever the table has
with newest as materialized (
    select g.queue, g.status, g.finished_at from durable.gen_durable g order by g.id desc limit $1::int
)
select n.queue, count(*),
       count(*) filter (where n.status = 'done' and n.finished_at > durable.now() - make_interval(secs => $2::float8)),
       count(*) filter (where n.status = 'failed')
  from newest n group by n.queue order by n.queue
