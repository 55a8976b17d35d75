-- pick_fair: claim up to $2 due instances of one fair queue: of each key as many as the caller has decided. Waits for no lock.
-- params   $1 queue text · $2 limit int · $3 owner text · $4 lease seconds float8 · $5 known steps text[], as in pick_instances
--          entries, most urgent priority first and in the order in which they are served: $6 priority smallint[] · $7 fair key text[], '' for
--          rows without one · $8 rows int[] · $9 rows without a fair key bigint[], whichever are still on offer · $10 schema text
--          $11 shelved steps that this node knows text[], as $5 · $12 token hash bytea · $13 rows to leave alone bigint[] · $14 rows to take
--          from the shelf int. $6 with $7, $9 and $11 repeat nothing: else a row would be in the window twice
-- returns  as pick_instances, and at the end the fair key
-- moves    claimed · unfit · held · shelved · throttled · dropped · offered
-- locks    FOR NO KEY UPDATE SKIP LOCKED on the window, try-locks on its partition keys, and as pick_instances on the keys of its limits
-- index    gen_durable_fair, gen_durable_pkey, gen_durable_shelf, gen_durable_key, pauses_pkey
-- keeps    as pick_instances: only which rows are in the window differs. Within a fair key they are taken in order, but for rows that
--          another session has locked and those of $13
-- fence    as in pick_instances
-- cost     the batch's, and a probe for each entry. No cursor hides the dead entries at the head of a key: they are read until vacuum, or
--          until an index scan has marked them
-- plan     the window is a function: it stops when the batch is full, so entries that are not reached cost nothing
with stopped as materialized (
    select array_agg(p.fsm) as machines from durable.pauses p where p.queue = $1::text and durable.lasts(p.until)
), shelf as materialized (
    select c.* from unnest($11::text[]) m(at_step)
     cross join lateral (
        select g.id, g.priority, g.eligible_at, g.partition_key as k,
               g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step, 0 as place, g.rate_limit is not null as limited
          from durable.gen_durable g
         where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text
           and g.fsm = split_part(m.at_step, chr(31), 1) and g.fsm_version = split_part(m.at_step, chr(31), 2)::int
           and coalesce(g.shelved_step, '') = split_part(m.at_step, chr(31), 3)
           and durable.due(g.eligible_at)
         order by g.priority, g.eligible_at, g.id limit $14::int for no key update skip locked) c
     where (select s.machines is null from stopped s) or split_part(m.at_step, chr(31), 1) <> all ((select s.machines from stopped s)::text[])
), win as materialized (
    select w.id, w.priority, w.eligible_at, w.k, w.limited, w.at_step in (select unnest($5::text[]))
           and ((select s.machines is null from stopped s)
                or split_part(w.at_step, chr(31), 1) <> all ((select s.machines from stopped s)::text[])) as known from (
        (select * from shelf order by priority, eligible_at, id limit $14::int)
        union all
        select f.* from (select 1 from stopped s where s.machines is null or '' <> all (s.machines)) going
         cross join lateral durable.fair_window(
             $1::text, $2::int, $6::smallint[], $7::text[], $8::int[], $9::bigint[], $13::bigint[]) f
        order by priority, place, eligible_at, id limit $2::int) w
     where (select s.machines is null or '' <> all (s.machines) from stopped s)
), judged as materialized (
    select j.* from (
        select array_agg(k order by k, priority, eligible_at, id) filter (where known) ks,
               array_agg(priority order by k, priority, eligible_at, id) filter (where known) ps,
               array_agg(eligible_at order by k, priority, eligible_at, id) filter (where known) es,
               array_agg(id order by k, priority, eligible_at, id) filter (where known) ids,
               coalesce(array_agg(k) filter (where not known), '{}') gone
          from win where k is not null having count(*) > 0) a
     cross join lateral durable.judge_siblings($10::text, $5::text[], a.gone, a.ks, a.ps, a.es, a.ids) j
), limited as materialized (
    select l.* from (
        select array_agg(id order by priority, eligible_at, id) ids from win
         where limited and known and (k is null or id = any ((select j.claim from judged j)::bigint[])) having count(*) > 0) a
     cross join lateral durable.judge_limits($10::text, $1::text, a.ids, (select bool_and(w.limited and w.k is null) from win w where w.known),
                                             array(select w.id from win w where not w.known)) l
), shelved as (
    update durable.gen_durable g
       set hold = case when octet_length(g.queue || g.fsm || g.step) > 2600 then 0 else 2 end,
           shelved_step = case when octet_length(g.queue || g.fsm || g.step) > 2600 then g.shelved_step else g.step end,
           status = (case when octet_length(g.queue || g.fsm || g.step) > 2600 then 'failed' else 'runnable' end)::durable.durable_status,
           finished_at = case when octet_length(g.queue || g.fsm || g.step) > 2600 then durable.now() end,
           last_error = case when octet_length(g.queue || g.fsm || g.step) <= 2600 then g.last_error
                             else format('its machine name has %s bytes, its step name %s: too many to wait for a node that has them',
                                         octet_length(g.fsm), octet_length(g.step)) end,
           error_type = case when octet_length(g.queue || g.fsm || g.step) <= 2600 then g.error_type end,
           traceback = case when octet_length(g.queue || g.fsm || g.step) <= 2600 then g.traceback end,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = any (array(select w.id from win w where not w.known))
    returning g.id, g.priority, g.eligible_at,
              case when g.journal >= case when g.status = 'failed' then 1 else 3 end then durable.note(
                  g.id, g.rev, case when g.status = 'failed' then 'unfit' else 'shelved' end, g.step, null, g.visit, g.attempt, g.round,
                  failure => case when g.status = 'failed' then jsonb_build_object('text', g.last_error) end) end
), held as (
    update durable.gen_durable g set hold = 1, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = any ((select j.hold from judged j)::bigint[])
    returning g.id, g.priority, g.eligible_at,
              case when g.journal >= 3 then durable.note(g.id, g.rev, 'held', g.step, null, g.visit, g.attempt, g.round) end
), throttled as (
    update durable.gen_durable g set hold = 3, limited_by = u.key, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from limited l cross join lateral unnest(l.throttle, l.under) u(id, key)
     where g.id = u.id and (g.hold <> 3 or g.limited_by is distinct from u.key)
    returning case when g.journal >= 3 then durable.note(g.id, g.rev, 'throttled', g.step, null, g.visit, g.attempt, g.round,
                  further => jsonb_build_object('limited_by', g.limited_by)) end
), claimed as (
    update durable.gen_durable g
       set status = 'executing', hold = 0, locked_by = $3::text, rev = least(g.rev, 9223372036854775806) + 1,
           claim_id = ((select left(replace(gen_random_uuid()::text, '-', ''), 16)) || encode(int8send(g.id), 'hex'))::uuid,
           claim_token_hash = $12::bytea,
           lease_expires_at = pg_catalog.now() + make_interval(secs => $4::float8), updated_at = durable.now()
     where g.id = any (array(select w.id from win w where w.known and w.k is null and not w.limited) || (select l.claim from limited l)::bigint[]
               || coalesce((select case when l.claim is null then j.claim
                                        else array(select c.id from unnest(j.claim) c(id) where c.id <> all (l.throttle || l.leave)) end
                              from judged j left join limited l on true)::bigint[],
                           (select '{}'::bigint[] from set_config('synchronous_commit', 'off', true) where not exists (select 1 from limited))))
    returning g.id, g.priority, g.eligible_at, g.claim_id, g.fsm, g.fsm_version, g.step, g.attempt, g.crashes,
              g.visit, g.state, g.partition_key, g.parent_id, g.awaits, g.inbox, g.children_total, g.round, g.fair_key,
              case when g.journal > 0 or g.links is not null or g.max_attempts is not null or g.rate_limit is not null
                   or g.meta ? 'durable:trace'
                  then case when g.meta ? 'durable:trace' then coalesce(left(g.meta ->> 'durable:trace', 1000) || chr(31), '') else '' end
                  || coalesce(g.max_attempts || '#', '') || coalesce(g.links || '@', '')
                  || case when g.journal = 0 then '' else g.journal
                  || case when g.journal < 2 then '' else ' ' || coalesce(encode(g.fingerprint, 'hex'), '') end
                  || case when g.journal < 3 then '' else ' ' || g.lease_expires_at end end
                  || coalesce(chr(29) || g.rate_limit || chr(29) || g.weight, '') end as journal, g.cancellation,
              case when g.journal >= 3 then durable.note(g.id, g.rev, 'claimed', g.step, null, g.visit, g.attempt, g.round, g.claim_id,
                  g.locked_by, further => jsonb_build_object('lease_until', g.lease_expires_at, 'token_hash', g.claim_token_hash)) end
)
select id, priority, eligible_at, 'c', claim_id, fsm, fsm_version, step, attempt, crashes, visit, state, partition_key,
       parent_id, awaits, inbox, children_total, round, journal, cancellation, fair_key
  from claimed
union all
select id, priority, eligible_at, what, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null from (
    select id, priority, eligible_at, 'h' as what from held
    union all
    select id, priority, eligible_at, 's' from shelved
    union all
    select w.id, w.priority, w.eligible_at, 't' from win w, limited l where w.id = any (l.throttle)
    union all
    select id, priority, eligible_at, 'l' from win where known and (id = any ((select j.leave from judged j)::bigint[])
                                                                    or id = any ((select l.leave from limited l)::bigint[]))
    offset 0) others
