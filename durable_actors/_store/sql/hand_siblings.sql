-- hand_siblings: after outcomes that leave their partition keys: claim the first due row of each key for the node that ran them, or offer it.
-- params   $1 keys that the outcomes left text[], each once. Of the outcomes whose node takes the next row, arrays: $2 id bigint[] ·
--          $3 claim uuid[] · $4 key text[] · $5 priority smallint[] · $6 queue text[] · $7 whether its row may
--          be deleted boolean[]; $8 token of the group whose rows are deleted uuid, or null. Of the node: $9 owner text · $10 lease seconds
--          float8 · $11 token hash bytea · $12 queues text[] · $13 how many it takes of each int[] · $14 known steps text[], as pick_instances
-- returns  as tell_dependents: per row that is on offer now its queue, id, priority, eligible_at, 'o'; per claim its queue, and what
--          pick_instances returns of a claim
-- moves    claimed · offered
-- locks    FOR NO KEY UPDATE SKIP LOCKED on the first row of each key; runs in the transaction of the outcomes, after them, so that its
--          snapshot sees what was held behind their rows
-- index    gen_durable_pkey, gen_durable_key, gen_durable_held, flushes_pkey, pauses_pkey
-- plan     driven from the arrays; hash and merge joins are off where this is sent. It does not ask whether a row of the key is executing: that
--          follows, and without statistics the planner would read all executing rows for each key.
--          What is excluded is a hashed subplan (NOT IN, nothing of it is null): a list is compared one by one, 7 of 26 µs a key in a
--          group of 1,000
-- keeps    I9 one running step per key, in order: a key is handed on only if this very transaction took its row out of "executing" (xmin; a
--          deleted row: the token of its group), and nobody else's snapshot has the key free before that is committed. So no decision lock is
--          needed, and gen_durable_key_executing refuses nothing. A row that enters another key leaves its old one to the pick. A repeated outcome, whose row another transaction wrote, hands on nothing.
--          In order: the first of all due rows that keep their place, whether or not this node knows their steps; if that one does not fit
--          or is locked, nobody gets the key here, and the key's first held row is offered, as promote_siblings does.
--          I7 no wake-up is lost: each key of $1 has a row claimed or, if one is held, offered.
--          What a pick decides about is left to the pick: other queues, steps that the node does not know, limits, the shelf, requests, and
--          rows less urgent than the outcome's
-- fence    as in pick_instances. The commit that carries this waits for the disk
-- cost     a hand-over saves the offer and the pick: one written row, two statements and a transaction that waits for the disk
with freed as materialized (
    select u.key, u.priority, u.queue
      from unnest($2::bigint[], $3::uuid[], $4::text[], $5::smallint[], $6::text[], $7::boolean[])
           u(id, claim, key, priority, queue, deletes)
      left join durable.gen_durable g on g.id = u.id
     where case when g.id is not null then g.claim_id = u.claim and g.locked_by is null and g.partition_key = u.key
                                           and g.xmin = pg_current_xact_id()::xid
                else u.deletes and exists (select 1 from durable.flushes f
                                            where f.token = $8::uuid and u.id <> all (coalesce(f.kept, '{}'))) end
), first as materialized (
    select f.key, x.id, x.rev
      from freed f
     cross join lateral (
        select y.id, y.rev, y.hold in (0, 1) and y.queue = f.queue and y.priority <= f.priority and y.rate_limit is null
                            and y.request is null and y.id not in (select unnest($2::bigint[]))
                            and y.fsm || chr(31) || y.fsm_version || chr(31) || y.step in (select unnest($14::text[])) as fits
          from durable.gen_durable y
         where y.partition_key = f.key and y.status = 'runnable' and durable.due(y.eligible_at) and durable.keeps_place(y.hold)
           and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
           and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
         order by y.priority, y.eligible_at, y.id limit 1) x
     where x.fits
), locked as materialized (
    select f.key, y.id, row_number() over (partition by y.queue order by y.priority, y.eligible_at, y.id) as nth, y.queue
      from first f
     cross join lateral (
        select g.id, g.queue, g.priority, g.eligible_at from durable.gen_durable g
         where g.id = f.id and g.rev = f.rev and g.status = 'runnable' for no key update skip locked) y
), taken as materialized (
    select l.key, l.id from locked l
     where l.nth <= (select u.room from unnest($12::text[], $13::int[]) u(queue, room) where u.queue = l.queue)
), claimed as (
    update durable.gen_durable g
       set status = 'executing', hold = 0, locked_by = $9::text, rev = least(g.rev, 9223372036854775806) + 1,
           claim_id = ((select left(replace(gen_random_uuid()::text, '-', ''), 16)) || encode(int8send(g.id), 'hex'))::uuid,
           claim_token_hash = $11::bytea,
           lease_expires_at = pg_catalog.now() + make_interval(secs => $10::float8), updated_at = durable.now()
     where g.id = any (array(select t.id from taken t))
    returning g.queue, g.id, g.priority, g.eligible_at, g.claim_id, g.fsm, g.fsm_version, g.step, g.attempt, g.crashes,
              g.visit, g.state, g.partition_key, g.parent_id, g.awaits, g.inbox, g.children_total, g.round,
              case when g.journal > 0 or g.links is not null or g.max_attempts is not null or g.meta ? 'durable:trace'
                  then case when g.meta ? 'durable:trace' then coalesce(left(g.meta ->> 'durable:trace', 1000) || chr(31), '') else '' end
                  || coalesce(g.max_attempts || '#', '') || coalesce(g.links || '@', '')
                  || case when g.journal = 0 then '' else g.journal
                  || case when g.journal < 2 then '' else ' ' || coalesce(encode(g.fingerprint, 'hex'), '') end
                  || case when g.journal < 3 then '' else ' ' || g.lease_expires_at end end end as journal, g.cancellation,
              case when g.journal >= 3 then durable.note(g.id, g.rev, 'claimed', g.step, null, g.visit, g.attempt, g.round, g.claim_id,
                  g.locked_by, further => jsonb_build_object('lease_until', g.lease_expires_at, 'token_hash', g.claim_token_hash)) end
), promoted as (
    update durable.gen_durable g set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = any (array(
        select h.id from unnest($1::text[]) u(key)
         cross join lateral (
            select y.id from durable.gen_durable y
             where y.partition_key = u.key and y.status = 'runnable' and y.hold = 1
               and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
               and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
             order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h
         where u.key not in (select t.key from taken t)))
    returning g.queue, g.id, g.priority, g.eligible_at,
              case when g.journal >= 3 then durable.note(g.id, g.rev, 'offered', g.step, null, g.visit, g.attempt, g.round) end
)
select c.queue, c.id, c.priority, c.eligible_at, 'c', c.claim_id, c.fsm, c.fsm_version, c.step, c.attempt, c.crashes, c.visit, c.state,
       c.partition_key, c.parent_id, c.awaits, c.inbox, c.children_total, c.round, c.journal, c.cancellation
  from claimed c
union all
select p.queue, p.id, p.priority, p.eligible_at, 'o', null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
       null
  from promoted p
