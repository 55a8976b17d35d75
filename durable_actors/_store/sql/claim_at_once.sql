-- claim_at_once: claim the instance that this transaction has inserted or woken, before anybody else can see it. Never waits.
-- params   $1 queues in which the node takes one text[] · $2 ids bigint[]; an empty array: the instance that this transaction has inserted
--          last · $3 owner text · $4 lease seconds float8 · $5 known steps text[], as in pick_instances · $6 token hash bytea
-- returns  per claimed row what pick_instances returns, then its queue; in no order. A missing row is not on offer (a signal woke nothing),
--          is in no such queue, has a key or a limit, is not due, its machine or step is unknown here, its queue or machine is paused,
--          or it has a record of every move (journal >= 3): that would be of two moves. Then it is hinted at, and picked
-- moves    claimed
-- locks    FOR NO KEY UPDATE SKIP LOCKED on the row, which this transaction holds already
-- index    gen_durable_pkey, pauses_pkey
-- keeps    I2 one live claim per instance: the row and its claim are committed together · a paused queue, as in pick_instances
-- fence    as in pick_instances. Unlike there its commit waits for the disk: it is that of the insert or of the signal
-- cost     0.1 ms of a round trip that is made anyway; a pick of its own takes 0.6 ms on a server that was asleep
with mine as materialized (
    select g.id
      from durable.gen_durable g
     where g.id = any (array(select unnest($2::bigint[]) union all
                             select currval('durable.gen_durable_id_seq') where cardinality($2::bigint[]) = 0))
       and durable.offered(g.status, g.hold) and g.queue = any ($1::text[])
       and durable.due(g.eligible_at) and g.partition_key is null and g.rate_limit is null and g.journal < 3
       and g.fsm || chr(31) || g.fsm_version || chr(31) || g.step = any ($5::text[])
       and not exists (select 1 from durable.pauses p where p.queue = g.queue and p.fsm in ('', g.fsm) and durable.lasts(p.until))
       for no key update skip locked
)
update durable.gen_durable g
   set status = 'executing', locked_by = $3::text, rev = least(g.rev, 9223372036854775806) + 1,
       claim_id = ((select left(replace(gen_random_uuid()::text, '-', ''), 16)) || encode(int8send(g.id), 'hex'))::uuid,
       claim_token_hash = $6::bytea,
       lease_expires_at = pg_catalog.now() + make_interval(secs => $4::float8), updated_at = durable.now()
 where g.id = any (array(select m.id from mine m))
returning g.id, g.priority, g.eligible_at, 'c', g.claim_id, g.fsm, g.fsm_version, g.step, g.attempt, g.crashes,
          g.visit, g.state, g.partition_key, g.parent_id, g.awaits, g.inbox, g.children_total, g.round,
          case when g.journal > 0 or g.links is not null or g.max_attempts is not null or g.meta ? 'durable:trace'
                  then case when g.meta ? 'durable:trace' then coalesce(left(g.meta ->> 'durable:trace', 1000) || chr(31), '') else '' end
                  || coalesce(g.max_attempts || '#', '') || coalesce(g.links || '@', '')
                  || case when g.journal = 0 then '' else g.journal
                  || case when g.journal < 2 then '' else ' ' || coalesce(encode(g.fingerprint, 'hex'), '') end end end,
          g.cancellation, g.queue
