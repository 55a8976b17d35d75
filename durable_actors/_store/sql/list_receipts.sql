-- list_receipts: the commands that were carried out, newest first. For operators.
-- params   $1 below this id bigint · $2 limit int · $3 command text, may be null
-- returns  commands.Receipt, newest first
-- locks    none
-- index    receipts_pkey
-- cost     a rare command reads the receipts of others until it has found enough
select r.id, r.at, r.command, r.scope, r.target, r.by, r.reason, r.idempotency_key, r.data, r.result
  from durable.receipts r
 where r.id < $1::bigint and ($3::text is null or r.command = $3::text)
 order by r.id desc limit $2::int
