-- read_pauses: what is paused: queues, and machines in queues.
-- params   $1 queues text[], or null for all
-- returns  queue · machine, or '' for the whole queue · until, at timestamptz · by · reason · seconds until it is over float8, or null
-- locks    none
-- index    pauses_pkey
select p.queue, p.fsm, p.until, p.at, p.by, p.reason, (extract(epoch from p.until) - extract(epoch from durable.now()))::float8
  from durable.pauses p
 where ($1::text[] is null or p.queue = any ($1::text[])) and durable.lasts(p.until)
 order by p.queue, p.fsm
