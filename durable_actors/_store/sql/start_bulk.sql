-- start_bulk: the receipt of a bulk command, whose id is that of the bulk. Each instance gets a receipt of its own beside it.
-- params   $1 command text · $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb: the filter, as given and frozen ·
--          $6 result jsonb: how many instances match
-- returns  the receipt's id
-- locks    the new row
-- index    receipts_once: the same key again is the same bulk
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
values ($1::text, 'bulk', 'instances', $2::text, $3::text, $4::text, $5::jsonb, $6::jsonb)
returning r.id
