-- retry_instance: let a failed or cancelled instance run again in the step where it ended, with attempts and crashes from 0. A command.
-- params   $1 id bigint; of the receipt, in this order in every command: $2 by text · $3 reason text · $4 idempotency key text (each may
--          be null) · $5 data jsonb
-- returns  the receipt's result, which is the id, when it had failed or was cancelled; nothing otherwise
-- moves    recounted · revived
-- locks    its row, then what is known of those that it comes after (durable.wait_again), then its parent's row
-- index    gen_durable_pkey, graph_pkey, receipts_once
-- keeps    the visit, and with it the step's idempotency key; inbox, awaits and dedup keys, so that the step is handed what it
--          was handed when it failed; the round, which its failure has counted. I11 barriers release exactly once: its end was counted; if
--          its parent still waits at that barrier, it is waited for again. A unique key that another instance occupies
--          by now refuses it: gen_durable_unique. A request to the node that ran it is over.
--          What it comes after is counted anew: what has not ended, or ended badly, it waits for. One
--          that compensates waits for nothing: a tell leaves it alone.
--          Effect and receipt are one statement, and the receipt derives from RETURNING: neither exists without the other, also
--          in a savepoint. The same key again, while the first call is under way or after the instance has failed once more, is
--          refused by receipts_once, with all that this statement did. A function that writes the receipt would hide it from
--          whoever reads this file, and save two lines.
with target as materialized (
    select y.id, y.attempt, y.links, y.cancellation, coalesce(y.cancellation ? 'upstream' or y.cancellation ? 'limit', false) as doomed,
           coalesce(y.cancellation ? 'rate_limit', false) as limited from durable.gen_durable y
     where y.id = $1::bigint and y.status in ('failed', 'cancelled') for no key update
), ended as materialized (  -- under the row's lock
    select t.id, t.attempt, t.doomed, t.limited,
           case when t.links in (1, 3) and (t.cancellation is null or t.doomed) then durable.wait_again(t.id) else 0 end as waits
      from target t
), again as (
    update durable.gen_durable g
       set status = 'runnable', hold = case when ended.waits > 0 then 5 else 0 end,
           rate_limit = case when ended.doomed then coalesce(g.cancellation ->> 'rate_limit', g.rate_limit) else g.rate_limit end,
           cancellation = case when ended.doomed then null else g.cancellation end, attempt = 0, crashes = 0, rev = least(g.rev, 9223372036854775806) + 1, eligible_at = durable.now(), finished_at = null,
           claim_id = null, claim_token_hash = null, request = null, updated_at = durable.now()
      from ended
     where g.id = ended.id
    returning g.id, g.parent_id, g.barrier,
              case when g.journal >= 2 then durable.note(
                  g.id, g.rev, 'revived', g.step, g.step, g.visit, ended.attempt, g.round, commander => $2::text,
                  further => jsonb_build_object('command', jsonb_strip_nulls(jsonb_build_object(
                      'type', 'retry', 'key', $4::text, 'reason', $3::text)) || jsonb_build_object('metadata', $5::jsonb))
                      || case when g.hold = 5 then '{"hold": 5}' else '{}'::jsonb end
                      || case when not ended.doomed then '{}'::jsonb else jsonb_build_object(
                             'columns', '{"cancellation": null}'::jsonb
                             || case when ended.limited then jsonb_build_object('rate_limit', g.rate_limit) else '{}' end) end) end
), waited_for as (
    update durable.gen_durable p set children_pending = p.children_pending + 1, rev = least(p.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from again a
     where p.id = a.parent_id and p.visit = a.barrier and p.status = 'awaiting_children'
    returning case when p.journal >= 3 then durable.note(p.id, p.rev, 'recounted', p.step, null, p.visit, p.attempt, p.round,
                  further => jsonb_build_object('count', 1, 'pending', p.children_pending)) end
)
insert into durable.receipts as r (command, scope, target, by, reason, idempotency_key, data, result)
select 'retry', 'instance', a.id::text, $2::text, $3::text, $4::text, $5::jsonb, to_jsonb(a.id) from again a
returning r.result
