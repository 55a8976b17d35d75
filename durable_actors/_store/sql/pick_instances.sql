-- pick_instances: claim up to $2 due instances of one queue, the most urgent first. Waits for no lock.
-- params   $1 queue text · $2 limit int · $3 owner text · $4 lease seconds float8 · $5 known steps text[]: fsm, version and step,
--          separated by chr(31), which no name of a machine or step contains; so no two rows look alike, whatever a hand wrote
--          $6 priorities smallint[] · $7 $8 cursor per priority timestamptz[], bigint[] ('-infinity', -2^63: from the head)
--          $9 extra ids bigint[], to look at even if they lie before the cursor · $10 schema text
--          $11 shelved steps that this node knows text[], as $5 · $12 token hash bytea
--          $6, $9 and $11 repeat nothing: else a row would be in the window twice
--          Extra ids may be throttled rows whose token has come (read_thawed): the cursor says nothing about those
-- returns  per row of the window, in no order: id, priority, eligible_at, what (c claimed · h held · s shelved · t throttled ·
--          l left for a later look), and for claimed ones the claim; its limits follow the journal's columns, after chr(29)
-- moves    claimed · unfit · held · shelved · throttled · dropped · offered
-- locks    FOR NO KEY UPDATE SKIP LOCKED on the window, try-locks on its keys and on the keys of its limits, whose lines in limit_waits it takes
--          with SKIP LOCKED. A window of nothing but limited rows, whose keys are all busy, is tried again every millisecond, for 20 ms; but not
--          if one has a partition key: judge_siblings may have locked the executing row of that key, whose commit would wait as long.
--          Nor if $2 is 1: claim_next and execute_next, which want one row, try one after another
-- index    gen_durable_pick, gen_durable_shelf, gen_durable_key, gen_durable_pkey, pauses_pkey; with limits
--          gen_durable_throttled, gen_durable_slots, limits_pkey, limit_keys_pkey, limit_waits_pkey
-- keeps    I2 one live claim per instance · I9 one running step per key, in order. A paused queue: no claim that this statement makes is
--          younger than the pause, because it reads `pauses` itself, in its own snapshot; nothing else of it runs then. Rows of a paused
--          machine are set aside like those of an unknown one, so that they slow nobody, and are found on the shelf when the pause is over.
--          Limits: only what its key would let run is judged (judge_limits), so nothing is charged for a row that does not start
-- fence    a claim id is 60 random bits of this pick, then the row's id: no claim of a row repeats, whatever a crash of the
--          server may forget. A random number for each row cost 5 of the 24 µs that a claim takes where Postgres is built
--          without OpenSSL: it opens, reads and closes /dev/urandom every time.
--          The commit of a pick does not wait for the disk unless its window has a keyed row. A crash of the server may lose the
--          claims of the last half second: their rows are runnable as before, and the fence refuses their outcomes. Half of
--          all fsyncs went here, and a quarter of the time from insert to step. The claim of a keyed row must not be lost:
--          a sibling could run at the same time as a worker that the crash did not stop. So it is with a slot, and tokens.
-- cost     the batch's: every window row is claimed, leaves the index (held, shelved), or is passed by the cursor. Only
--          'l' rows stay, and the caller looks at them again by id. A list of priorities instead of a range makes
--          eligible_at an index bound, so future rows are never read.
-- plan     `known` is decided once per row, by a hashed subplan: compared one by one, 5,000 known steps cost 60 µs a row. Hashed
--          they cost 0.7 ms a pick (500 machines with 10 steps each), and the few of most programs 10 to 20 µs.
--          Only win is materialized, without the addresses. Extra rows that lie after the cursor are left to head, so the
--          parts share no row and need no UNION. Without a keyed row judge_siblings is not called. Rows that are not claimed
--          share one list of nulls (OFFSET keeps the planner from copying it). Together this saves 7.7 % of the server's
--          instructions, for 10 rows as for 34
-- hostile  a row whose names the shelf's index could not hold (only a hand writes one; names have 255 characters at most) ends
--          as failed: shelved, it would refuse every pick of its queue, for ever
with extra as materialized (
    select g.id, g.priority, g.eligible_at, g.partition_key as k,
       g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step, g.rate_limit is not null as limited
      from durable.gen_durable g
     where g.id = any ($9::bigint[]) and g.status = 'runnable' and (g.hold = 0 or g.hold = 3) and g.queue = $1::text
       and durable.due(g.eligible_at)
       and (g.hold = 3 or not exists (select 1 from unnest($6::smallint[], $7::timestamptz[], $8::bigint[]) b(priority, at, id)
                                       where g.priority = b.priority and (g.eligible_at, g.id) > (b.at, b.id)))
       for no key update skip locked
), stopped as materialized (
    select array_agg(p.fsm) as machines from durable.pauses p where p.queue = $1::text and durable.lasts(p.until)
), shelf as materialized (
    select c.* from unnest($11::text[]) m(at_step)
     cross join lateral (
        select g.id, g.priority, g.eligible_at, g.partition_key as k,
               g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step, g.rate_limit is not null as limited
          from durable.gen_durable g
         where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text
           and g.fsm = split_part(m.at_step, chr(31), 1) and g.fsm_version = split_part(m.at_step, chr(31), 2)::int
           and coalesce(g.shelved_step, '') = split_part(m.at_step, chr(31), 3)
           and durable.due(g.eligible_at)
         order by g.priority, g.eligible_at, g.id limit $2::int for no key update skip locked) c
     where (select s.machines is null from stopped s) or split_part(m.at_step, chr(31), 1) <> all ((select s.machines from stopped s)::text[])
), win as materialized (
    select w.id, w.priority, w.eligible_at, w.k, w.limited, w.at_step in (select unnest($5::text[]))
           and ((select s.machines is null from stopped s)
                or split_part(w.at_step, chr(31), 1) <> all ((select s.machines from stopped s)::text[])) as known from (
        select * from extra
        union all
        select * from shelf
        union all
        select head.* from (
            select c.* from unnest($6::smallint[], $7::timestamptz[], $8::bigint[]) p(priority, at, id)
             cross join lateral (
                select g.id, g.priority, g.eligible_at, g.partition_key as k,
                       g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step, g.rate_limit is not null as limited
                  from durable.gen_durable g
                 where durable.offered(g.status, g.hold) and g.queue = $1::text and g.priority = p.priority
                   and durable.due(g.eligible_at) and (g.eligible_at, g.id) > (p.at, p.id)
                 order by g.eligible_at, g.id limit $2::int for no key update skip locked) c
             limit $2::int) head
        order by priority, eligible_at, id limit $2::int) w
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
     cross join lateral durable.judge_limits($10::text, $1::text, a.ids, $2::int > 1 and (select bool_and(w.limited and w.k is null) from win w where w.known),
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
              g.visit, g.state, g.partition_key, g.parent_id, g.awaits, g.inbox, g.children_total, g.round,
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
       parent_id, awaits, inbox, children_total, round, journal, cancellation
  from claimed
union all
select id, priority, eligible_at, what, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null from (
    select id, priority, eligible_at, 'h' as what from held
    union all
    select id, priority, eligible_at, 's' from shelved
    union all
    select w.id, w.priority, w.eligible_at, 't' from win w, limited l where w.id = any (l.throttle)
    union all
    select id, priority, eligible_at, 'l' from win where known and (id = any ((select j.leave from judged j)::bigint[])
                                                                    or id = any ((select l.leave from limited l)::bigint[]))
    offset 0) others
