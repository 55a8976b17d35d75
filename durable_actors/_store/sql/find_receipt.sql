-- find_receipt: the receipt of a command with this idempotency key, if it was carried out.
-- params   $1 command text · $2 scope text · $3 target text · $4 idempotency key text
-- returns  commands.Receipt
-- locks    none
-- index    receipts_once
select r.id, r.at, r.command, r.scope, r.target, r.by, r.reason, r.idempotency_key, r.data, r.result
  from durable.receipts r
 where r.command = $1::text and r.scope = $2::text and r.target = $3::text and r.idempotency_key = $4::text
