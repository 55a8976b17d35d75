-- retry_instance: let a failed instance run again in the step where it failed, with attempts and crashes from 0.
-- params   $1 id bigint
-- returns  id, when it was failed; nothing otherwise
-- locks    its row, then its parent's: the order of every commit
-- index    gen_durable_pkey
-- keeps    the visit, and with it the step's idempotency key; inbox, awaits and dedup keys, so that the step is handed what it
--          was handed when it failed; the round, which its failure has counted. I11 barriers release exactly once: its end was counted; if
--          its parent still waits at that barrier, it is waited for again. A unique key that another instance occupies
--          by now refuses it: gen_durable_unique.
with again as (
    update durable.gen_durable g
       set status = 'runnable', hold = 0, attempt = 0, crashes = 0, rev = least(g.rev, 9223372036854775806) + 1, eligible_at = now(), finished_at = null,
           claim_id = null, claim_token_hash = null, updated_at = now()
     where g.id = $1::bigint and g.status = 'failed'
    returning g.id, g.parent_id, g.barrier
), waited_for as (
    update durable.gen_durable p set children_pending = p.children_pending + 1, updated_at = now()
      from again a
     where p.id = a.parent_id and p.visit = a.barrier and p.status = 'awaiting_children'
)
select a.id from again a
