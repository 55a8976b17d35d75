-- get_checkpoint: the checkpoint of a thread, as it is stored.
-- params   $1 thread text
-- returns  rev, format, body in Base64, or null if somebody stored something else; nothing if there is none
-- locks    none
-- index    checkpoints_pkey
select c.rev, c.format, case when jsonb_typeof(c.projection) = 'string' then c.projection #>> '{}' end
  from durable.checkpoints c where c.thread = $1::text
