-- resume_queue: end the pause of a queue, or of one machine in it. A command.
-- params   $1 target text, as the receipts name it; of the receipt, as in every command: $2 by text · $3 reason text · $4 idempotency key text ·
--          $5 data jsonb; $6 queue text · $7 machine text, or '' for all
-- returns  the receipt's result: the pause that has ended, as a JSON object; nothing if it was not paused
-- locks    its row in pauses
-- index    pauses_pkey, receipts_once
-- keeps    rows of the machine that picks have set aside: they are on the shelf, where the next look of every node finds them
with ended as (
    delete from durable.pauses p where p.queue = $6::text and p.fsm = $7::text and durable.lasts(p.until)
    returning p.queue, p.fsm, p.until, p.at, p.by, p.reason
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'resume', 'queue', $1::text, $2::text, $3::text, $4::text, $5::jsonb,
       jsonb_build_object('queue', e.queue, 'machine', nullif(e.fsm, ''), 'until', e.until, 'at', e.at, 'by', e.by, 'reason', e.reason)
  from ended e
returning r.result
