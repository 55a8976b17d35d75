-- list_receipts_of: the commands that were carried out on one target, newest first. For operators.
-- params   $1 scope text · $2 target text · $3 below this id bigint · $4 limit int · $5 command text, may be null
-- returns  commands.Receipt, newest first
-- locks    none
-- index    receipts_target
select r.id, r.at, r.command, r.scope, r.target, r.by, r.reason, r.idempotency_key, r.data, r.result
  from durable.receipts r
 where r.scope = $1::text and r.target = $2::text and r.id < $3::bigint and ($5::text is null or r.command = $5::text)
 order by r.id desc limit $4::int
