-- pick_instances: claim up to $2 due instances of one queue, the most urgent first. Never waits.
-- params   $1 queue text · $2 limit int · $3 owner text · $4 lease seconds float8 · $5 known steps text[]: fsm, version and step,
--          separated by chr(31), which no name of a machine or step contains; so no two rows look alike, whatever a hand wrote
--          $6 priorities smallint[] · $7 $8 cursor per priority timestamptz[], bigint[] ('-infinity', -2^63: from the head)
--          $9 extra ids bigint[], to look at even if they lie before the cursor · $10 schema text
--          $11 shelved steps that this node knows text[], as $5 · $12 token hash bytea
-- returns  per row of the window, in no order: id, priority, eligible_at, what (c claimed · h held · s shelved · l left
--          for a later look), and for claimed ones the claim
-- locks    FOR NO KEY UPDATE SKIP LOCKED on the window, try-locks on its keys
-- index    gen_durable_pick, gen_durable_shelf, gen_durable_key, gen_durable_pkey
-- keeps    I2 one live claim per instance · I9 one running step per key, in order
-- fence    a claim id is 60 random bits of this pick, then the row's id: no claim of a row repeats, whatever a crash of the
--          server may forget. A random number for each row cost 5 of the 24 µs that a claim takes where Postgres is built
--          without OpenSSL: it opens, reads and closes /dev/urandom every time.
--          The commit of a pick does not wait for the disk unless it claims a keyed row. A crash of the server may lose the
--          claims of the last half second: their rows are runnable as before, and the fence refuses their outcomes. Half of
--          all fsyncs went here, and a quarter of the time from insert to step. The claim of a keyed row must not be lost:
--          a sibling could run at the same time as a worker that the crash did not stop.
-- cost     the batch's: every window row is claimed, leaves the index (held, shelved), or is passed by the cursor. Only
--          'l' rows stay, and the caller looks at them again by id. A list of priorities instead of a range makes
--          eligible_at an index bound, so future rows are never read.
-- plan     `known` is decided once per row, by a hashed subplan: compared one by one, 5,000 known steps cost 60 µs a row. Hashed
--          they cost 0.7 ms a pick (500 machines with 10 steps each), and the few of most programs 10 to 20 µs
-- hostile  a row whose names the shelf's index could not hold (only a hand writes one; names have 255 characters at most) ends
--          as failed: shelved, it would refuse every pick of its queue, for ever
with extra as materialized (
    select g.id, g.priority, g.eligible_at, g.partition_key as k,
       g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
      from durable.gen_durable g
     where g.id = any ($9::bigint[]) and g.status = 'runnable' and g.hold = 0 and g.queue = $1::text
       and g.eligible_at <= now()
       for no key update skip locked
), shelf as materialized (
    select c.* from unnest($11::text[]) m(at_step)
     cross join lateral (
        select g.id, g.priority, g.eligible_at, g.partition_key as k,
               g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
          from durable.gen_durable g
         where g.status = 'runnable' and g.hold = 2 and g.queue = $1::text
           and g.fsm = split_part(m.at_step, chr(31), 1) and g.fsm_version = split_part(m.at_step, chr(31), 2)::int
           and coalesce(g.shelved_step, '') = split_part(m.at_step, chr(31), 3)
           and g.eligible_at <= now()
         order by g.priority, g.eligible_at, g.id limit $2::int for no key update skip locked) c
), head as materialized (
    select c.* from unnest($6::smallint[], $7::timestamptz[], $8::bigint[]) p(priority, at, id)
     cross join lateral (
        select g.id, g.priority, g.eligible_at, g.partition_key as k,
           g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
          from durable.gen_durable g
         where g.status = 'runnable' and g.hold = 0 and g.queue = $1::text and g.priority = p.priority
           and g.eligible_at <= now() and (g.eligible_at, g.id) > (p.at, p.id)
         order by g.eligible_at, g.id limit $2::int for no key update skip locked) c
     limit $2::int
), win as materialized (
    select w.*, w.at_step in (select unnest($5::text[])) as known from (
        select * from extra union select * from shelf union select * from head
         order by priority, eligible_at, id limit $2::int) w
), mine as materialized (
    select * from win where known
), judged as materialized (
    select j.*, case when a.ks is null then set_config('synchronous_commit', 'off', true) end from (
        select array_agg(k order by k, priority, eligible_at, id) ks,
               array_agg(priority order by k, priority, eligible_at, id) ps,
               array_agg(eligible_at order by k, priority, eligible_at, id) es,
               array_agg(id order by k, priority, eligible_at, id) ids
          from mine where k is not null) a
     cross join lateral durable.judge_siblings(
        $10::text, $5::text[], array(select w.k from win w where w.k is not null and not w.known),
        a.ks, a.ps, a.es, a.ids) j
), shelved as (
    update durable.gen_durable g
       set hold = case when octet_length(g.queue || g.fsm || g.step) > 2600 then 0 else 2 end,
           shelved_step = g.step,
           status = (case when octet_length(g.queue || g.fsm || g.step) > 2600 then 'failed' else 'runnable' end)::durable.durable_status,
           finished_at = case when octet_length(g.queue || g.fsm || g.step) > 2600 then now() end,
           last_error = case when octet_length(g.queue || g.fsm || g.step) <= 2600 then g.last_error
                             else format('its machine name has %s bytes, its step name %s: too many to wait for a node that has them',
                                         octet_length(g.fsm), octet_length(g.step)) end,
           updated_at = now()
     where g.id = any (array(select w.id from win w where not w.known))
    returning g.id, g.priority, g.eligible_at
), held as (
    update durable.gen_durable g set hold = 1, updated_at = now()
     where g.id = any ((select j.hold from judged j)::bigint[])
    returning g.id, g.priority, g.eligible_at
), claimed as (
    update durable.gen_durable g
       set status = 'executing', hold = 0, locked_by = $3::text,
           claim_id = ((select left(replace(gen_random_uuid()::text, '-', ''), 16)) || encode(int8send(g.id), 'hex'))::uuid,
           claim_token_hash = $12::bytea,
           lease_expires_at = now() + make_interval(secs => $4::float8), updated_at = now()
     where g.id = any (array(select m.id from mine m where m.k is null) || (select j.claim from judged j)::bigint[])
    returning g.id, g.priority, g.eligible_at, g.claim_id, g.fsm, g.fsm_version, g.step, g.attempt, g.crashes,
              g.visit, g.state, g.partition_key, g.parent_id, g.awaits, g.inbox, g.children_total, g.round
)
select id, priority, eligible_at, 'c', claim_id, fsm, fsm_version, step, attempt, crashes, visit, state, partition_key,
       parent_id, awaits, inbox, children_total, round
  from claimed
union all
select id, priority, eligible_at, 'h', null, null, null, null, null, null, null, null, null, null, null, null, null, null from held
union all
select id, priority, eligible_at, 's', null, null, null, null, null, null, null, null, null, null, null, null, null, null from shelved
union all
select m.id, m.priority, m.eligible_at, 'l', null, null, null, null, null, null, null, null, null, null, null, null, null, null
  from mine m where m.id = any ((select j.leave from judged j)::bigint[])
