-- accept_instance: record a row as it is, as the beginning of a new history. A command.
-- params   $1 id bigint; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text · $5 data jsonb
-- returns  the receipt's result, which is the id; nothing if there is no row, its outcomes are not recorded, or it has a time without end,
--          which no record can have
-- moves    snapshot
-- locks    its row
-- index    gen_durable_pkey, journal_pkey, receipts_once
-- keeps    everything but `rev`, which is greater than that of every record from here on. A claim stays what it is: its fence is not `rev`.
--          Bytes are in hexadecimal digits, whatever `bytea_output` the caller has. A pause is part of the history, a request to cancel is not.
with accepted as (
    update durable.gen_durable g
       set rev = least(greatest(g.rev, (select j.rev from durable.journal j where j.instance_id = $1::bigint order by j.rev desc limit 1)),
                       9223372036854775806) + 1,
           updated_at = durable.now()
     where g.id = $1::bigint and g.journal between 2 and 4
       and isfinite(g.eligible_at) and isfinite(g.inserted_at) and isfinite(coalesce(g.await_deadline, g.inserted_at))
       and isfinite(coalesce(g.finished_at, g.inserted_at)) and isfinite(coalesce(g.lease_expires_at, g.inserted_at))
    returning g.id, durable.note(
        g.id, g.rev, 'snapshot', g.step, null, g.visit, g.attempt, 0, commander => $2::text, further => jsonb_build_object(
            'row', to_jsonb(g) - case when durable.asked_to_pause(g.request) then '' else 'request' end - case when g.journal < 4 then array['state', 'result'] else '{}' end
                   || jsonb_build_object('unique_key', chr(92) || 'x' || encode(g.unique_key, 'hex'),
                                         'unique_guard', null,
                                         'child_args', chr(92) || 'x' || encode(g.child_args, 'hex'),
                                         'claim_token_hash', chr(92) || 'x' || encode(g.claim_token_hash, 'hex'),
                                         'fingerprint', chr(92) || 'x' || encode(g.fingerprint, 'hex')),
            'command', jsonb_strip_nulls(jsonb_build_object('type', 'accept', 'key', $4::text, 'reason', $3::text))
                       || jsonb_build_object('metadata', $5::jsonb)))
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'accept', 'instance', a.id::text, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(a.id) from accepted a
returning r.result
