-- release_limit: let a key of a limit begin anew, or take the slot that an instance keeps. A command.
-- params   $1 name and key text; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb;
--          $6 instance whose kept slot is taken bigint; null: the key has all its tokens, and nobody is told to wait · $7 schema text
-- returns  the receipt's result: the key; nothing if there is nothing to release, or if the key of the command was used before
-- locks    the advisory lock of the key, for which it waits; the line of the kept slot
-- index    limit_keys_pkey, kept_slots_pkey, receipts_once
-- keeps    a step that runs has its slot until it ends: slots are counted from what executes, and none of them is given away twice. What is
--          throttled is looked at again at once
with rested as materialized (
    select $1::text as key where $6::bigint is null and durable.rest_limit($7::text, $1::text)
), freed as (
    delete from durable.kept_slots s where s.instance_id = $6::bigint and s.key = $1::text
    returning s.key, durable.expect_slot(s.key)
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'release', 'limit', d.key, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(d.key)
  from (select key from rested union all select key from freed) d
returning r.result
