-- put_checkpoint: store the checkpoint of a thread, in place of an earlier one.
-- params   $1 thread text · $2 rev bigint · $3 format int · $4 body text, in Base64: a checkpoint is stored byte for byte
-- returns  nothing
-- locks    the checkpoint's row
-- index    checkpoints_pkey
insert into durable.checkpoints as c (thread, rev, format, projection)
values ($1::text, $2::bigint, $3::int, to_jsonb($4::text))
on conflict (thread) do update set rev = excluded.rev, format = excluded.format, projection = excluded.projection, at = excluded.at
