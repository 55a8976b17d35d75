-- tell_dependents: tell the instances that come after ended ones: the last one that a dependent waits for offers it, or hands it over.
-- params   $1 ended instances bigint[], whose rows of `graph` this transaction has locked (lock_owed). What follows is of the node that may
--          claim dependents at once; with empty arrays none is: $2 owner text · $3 lease seconds float8 · $4 token hash bytea ·
--          $5 queues text[] · $6 how many it takes of each int[] · $7 priorities of rows that were on offer there smallint[] ·
--          $8 known steps text[], as in pick_instances
-- returns  per dependent that is on offer now: queue, id, priority, eligible_at, 'o', the rest is of no use. Per dependent that is handed over,
--          after its queue what pick_instances returns of a claim
-- moves    claimed · unblocked · doomed
-- locks    the dependents' rows of `graph` in id order: the update begins with the sorted edges. Then, of those that wait for nothing more,
--          the instances in id order, also paused ones: whoever resumes one must see the count, or this the resumed row.
--          An instance that does not wait is not locked: its own outcome may be in a flush that waits for ours
-- index    graph_pkey, gen_durable_pkey, gen_durable_pick, pauses_pkey
-- plan     each join begins with the ended ones, and looks up by primary key; hash and merge joins are off where this is sent
-- keeps    exactly once per end and dependent: `owed` names who was not told yet, and `told_at` the end of which they were told. A
--          dependent that was revived after that end is in `owed` again, and waits for the next one. I8 terminal rows never change.
--          What ended otherwise than "done" dooms those that want success: they are offered, and whoever claims one ends it as
--          cancelled without running anything, by the ordinary commit: so its barrier and its own dependents learn of it. Its limits go
--          into its cancellation, where a retry finds them: it must not wait for a token or a slot, nor spend one, to end.
--          An instance that is gone (only a hand deletes one that somebody waits for) counts as done.
--          One that is paused goes on counting, and is offered when it is resumed; one that compensates is left alone.
--          A hand-over is a claim like that of a pick: I2 one live claim per instance, of a row that nobody else could see on offer. Only of
--          what a pick of this moment would claim, and could not do in another order: nothing else of the queue is on offer, the queue is not
--          paused, nor a machine in it; it has no key, is due, and the node knows its step. It has no record of every move (journal < 3): that
--          would be of two moves
-- fence    as in pick_instances
-- cost     a hand-over saves a write of the instance, with an entry in each index, and a pick: 9 of 55 µs, 500 of 2,600 bytes of WAL
with ended as materialized (
    select e.id, e.owed, g.status, g.finished_at
      from durable.graph e
      left join durable.gen_durable g on g.id = e.id
     where e.id = any ($1::bigint[]) and e.owed is not null
       and case when g.id is not null then g.finished_at is not null and e.told_at is distinct from g.finished_at else true end
), told as (
    update durable.graph e set owed = null, told_at = x.finished_at from ended x where e.id = x.id
), edges as materialized (
    select d.id, count(*)::int as n, min(x.id) filter (where x.status <> 'done') as bad
      from ended x
     cross join lateral unnest(x.owed) d(id)
     where d.id not in (select y.id from ended y)
     group by d.id order by d.id
), counted as (
    update durable.graph e set waits = case when d.bad is null or e.any_end then greatest(e.waits - d.n, 0) else 0 end
      from edges d
     where e.id = d.id and e.waits > 0
    returning e.id, e.waits, case when not e.any_end then d.bad end as bad
), free as materialized (
    select u.queue, u.room
      from unnest($5::text[], $6::int[]) u(queue, room)
     where not exists (select 1 from durable.gen_durable g
                        where durable.offered(g.status, g.hold) and g.queue = u.queue and g.priority = any ($7::smallint[])
                          and durable.due(g.eligible_at))
       and not exists (select 1 from durable.pauses p where p.queue = u.queue and durable.lasts(p.until))
), ready as materialized (
    select y.id, y.hold, c.bad, y.queue, y.priority,
           y.queue in (select f.queue from free f) and c.bad is null and y.hold = 5 and y.partition_key is null and y.request is null
           and y.journal < 3 and y.rate_limit is null and durable.due(y.eligible_at)
           and y.fsm || chr(31) || y.fsm_version || chr(31) || y.step in (select unnest($8::text[])) as fits
      from counted c
      join durable.gen_durable y on y.id = c.id
     where c.waits = 0 and y.status = 'runnable' and y.hold in (4, 5) and y.cancellation is null
     order by y.id for no key update of y
), taken as materialized (
    select n.id
      from (select r.id, r.queue, row_number() over (partition by r.queue order by r.priority, r.id) as nth
              from ready r where r.fits) n
     where n.nth <= (select f.room from free f where f.queue = n.queue)
), offered as (
    update durable.gen_durable g
       set status = case when r.taken then 'executing' else g.status end,
           hold = case when r.taken then 0 else durable.hold_of(g.request) end,
           locked_by = case when r.taken then $2::text end,
           lease_expires_at = case when r.taken then pg_catalog.now() + make_interval(secs => $3::float8) end,
           claim_id = case when r.taken then
               ((select left(replace(gen_random_uuid()::text, '-', ''), 16)) || encode(int8send(g.id), 'hex'))::uuid else g.claim_id end,
           claim_token_hash = case when r.taken then $4::bytea else g.claim_token_hash end,
           eligible_at = case when r.bad is null then greatest(g.eligible_at, durable.now()) else durable.now() end,
           cancellation = case when r.bad is not null then (
               select jsonb_build_object('upstream', x.id, 'at', durable.now(), 'reason', format(
                          'upstream failed: %s %s', case when x.child_key is null then 'instance ' || x.id else x.child_key end,
                          case x.status when 'cancelled' then 'was cancelled' else x.status::text end))
                 from durable.gen_durable x where x.id = r.bad)
               || case when g.rate_limit is null then '{}' else jsonb_build_object('rate_limit', g.rate_limit) end end,
           rate_limit = case when r.bad is null then g.rate_limit end,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from (select y.id, y.hold, y.bad, y.id in (select t.id from taken t) as taken from ready y) r
     where g.id = r.id and (r.hold = 5 or r.bad is not null)
    returning g.id, g.queue, g.hold, g.priority, g.eligible_at, case when r.taken then 'c' else 'o' end as what, g.claim_id, g.fsm,
              g.fsm_version, g.step, g.attempt, g.crashes, g.visit, case when r.taken then g.state end as state, g.partition_key, g.parent_id,
              g.awaits, g.inbox, g.children_total, g.round,
              case when g.meta ? 'durable:trace' then coalesce(left(g.meta ->> 'durable:trace', 1000) || chr(31), '') else '' end
                  || coalesce(g.max_attempts || '#', '') || coalesce(g.links || '@', '') || case when g.journal = 0 then '' else g.journal
                  || case when g.journal < 2 then '' else ' ' || coalesce(encode(g.fingerprint, 'hex'), '') end end as journal, g.cancellation,
              case when g.journal >= case when r.bad is null then 3 else 2 end then durable.note(
                  g.id, g.rev, case when r.bad is null then 'unblocked' else 'doomed' end, g.step, null, g.visit, g.attempt, g.round,
                  further => case when r.bad is null then jsonb_build_object('eligible_at', g.eligible_at)
                                  else jsonb_build_object('eligible_at', g.eligible_at, 'columns', jsonb_build_object(
                                           'cancellation', g.cancellation)
                                           || case when g.cancellation ? 'rate_limit' then '{"rate_limit": null}'::jsonb else '{}' end) end) end
)
select o.queue, o.id, o.priority, o.eligible_at, o.what, o.claim_id, o.fsm, o.fsm_version, o.step, o.attempt, o.crashes, o.visit, o.state,
       o.partition_key, o.parent_id, o.awaits, o.inbox, o.children_total, o.round, o.journal, o.cancellation
  from offered o where o.hold = 0
