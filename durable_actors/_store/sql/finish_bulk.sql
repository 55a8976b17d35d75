-- finish_bulk: what came of a bulk command, into its receipt. Repeating it changes nothing; one that has finished
--          was not aborted, whoever says so late.
-- params   $1 the bulk's id bigint · $2 result jsonb · $3 the idempotency key of its commands text
-- returns  the result, with the number of instances that it was carried out on: batches that ran again may have counted some twice or never
-- locks    the receipt
-- index    receipts_pkey: only receipts that are younger than its own are read
update durable.receipts b
   set result = $2::jsonb || jsonb_build_object('done', (
           select count(*) from durable.receipts r
            where r.id > $1::bigint and r.command = b.command and r.scope = 'instance' and r.idempotency_key = $3::text))
 where b.id = $1::bigint and b.scope = 'bulk' and ($2::jsonb ? 'finished' or not b.result ? 'finished')
returning b.result
