-- count_statuses: instances per queue and status, finished and parked ones, too. For operators.
-- params   none
-- returns  queue, status, count
-- locks    none
-- index    none: READS THE WHOLE TABLE, for no index holds finished rows or parks without a deadline. The verbs that use
--          it say so; nothing of the engine does.
select g.queue, g.status, count(*) from durable.gen_durable g group by g.queue, g.status order by g.queue, g.status
