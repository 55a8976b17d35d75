-- drop_checkpoint: forget the checkpoint of a thread.
-- params   $1 thread text
-- returns  nothing
-- locks    the checkpoint's row
-- index    checkpoints_pkey
delete from durable.checkpoints c where c.thread = $1::text
