-- The functions for workers in other languages (0024) with all that 0029, 0030 and 0031 have added to the rows. Statements that an engine sends
-- have the text of their files.

create or replace function durable.pick_instances(text, int, text, float8, text[], smallint[], timestamptz[], bigint[], bigint[], text, text[], bytea)
returns table (id bigint, priority smallint, eligible_at timestamptz, what text, claim_id uuid, fsm text, fsm_version int, step text,
               attempt int, crashes int, visit bigint, state jsonb, partition_key text, parent_id bigint, awaits text[], inbox boolean,
               children_total int, round int, journal text, cancellation jsonb) language sql volatile as $$
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
$$;

drop function durable.insert_instances(text[], int[], text[], text[], text[], smallint[], text[], bytea[], text[], timestamptz[], float8[], bigint[], bigint[], text[], text[], smallint[], text[], text[], smallint[]);

create function durable.insert_instances(text[], int[], text[], text[], text[], smallint[], text[], bytea[], text[], timestamptz[], float8[], bigint[], bigint[], text[], text[], smallint[], text[], text[], smallint[], int[], text[], text[])
returns table (id bigint, occupant bigint) language sql volatile as $$
with input as materialized (
    select nextval('durable.gen_durable_id_seq') as id, u.* from (
        select * from unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::smallint[], $7::text[], $8::bytea[],
                             $9::text[], $10::timestamptz[], $11::float8[], $12::bigint[], $13::bigint[], $14::text[], $15::text[],
                             $16::smallint[], $17::text[], $18::text[], $19::smallint[], $20::int[], $21::text[], $22::text[])
             with ordinality
             i(fsm, version, step, state, queue, priority, partition_key, unique_key, scope, at, delay, parent, barrier, tags, meta, level,
               definition, child_key, links, max_attempts, fair_key, limits, ord)
         order by ord) u
), inserted as (
    insert into durable.gen_durable (id, fsm, fsm_version, step, state, queue, priority, partition_key, unique_key,
                                     unique_scope, eligible_at, parent_id, barrier, tags, meta, journal, fingerprint, hold, child_key, links,
                                     max_attempts, fair_key, rate_limit)
    overriding system value
    select id, fsm, version, step, state::jsonb, queue, priority, partition_key, unique_key,
           scope::durable.durable_status[], coalesce(at, durable.now() + make_interval(secs => coalesce(delay, 0))), parent, barrier,
           tags::text[], meta::jsonb, level, decode(definition, 'hex'), case when links in (1, 3) then 5 else 0 end, child_key, links,
           max_attempts, fair_key, limits
      from input order by unique_key nulls first, id
    on conflict (unique_guard) where unique_guard is not null do nothing
    returning id
), started as (
    insert into durable.journal (instance_id, rev, visit, attempt, kind, step, to_step, data)
    select i.id, 1, 1, 0, 'started', i.step, i.step,
           jsonb_build_object('row', jsonb_strip_nulls(jsonb_build_object(
               'fsm', i.fsm, 'fsm_version', i.version, 'step', i.step, 'queue', i.queue, 'priority', i.priority, 'journal', i.level,
               'eligible_at', coalesce(i.at, durable.now() + make_interval(secs => coalesce(i.delay, 0))),
               'partition_key', i.partition_key, 'unique_key', chr(92) || 'x' || encode(i.unique_key, 'hex'),  -- whatever bytea_output is
               'unique_scope', i.scope::durable.durable_status[], 'parent_id', i.parent, 'barrier', i.barrier, 'tags', i.tags::text[],
               'inserted_at', durable.now(), 'fingerprint', chr(92) || 'x' || i.definition, 'child_key', i.child_key, 'links', i.links,
               'fair_key', i.fair_key, 'rate_limit', i.limits,
               'hold', case when i.links in (1, 3) then 5 end, 'max_attempts', i.max_attempts))
               || case when i.meta is null then '{}' else jsonb_build_object('meta', i.meta::jsonb) end
               || case when i.level < 4 then '{}' else jsonb_build_object('state', i.state::jsonb) end)
           || case when i.parent is null then '{}' else jsonb_build_object('parent', (
               -- The statement's transaction has locked it, and it is still in the step that spawns.
               select jsonb_build_object('id', p.id, 'machine', p.fsm, 'step', p.step) from durable.gen_durable p where p.id = i.parent)) end
      from input i where i.level >= 2 and i.id in (select n.id from inserted n)
)
select case when o.new then o.id end,
       case when not o.new then (
           select g.id from durable.gen_durable g where g.unique_guard = o.unique_key) end
  from (select input.*, input.id in (select i.id from inserted i) as new from input offset 0) o
 order by o.ord
$$;

create or replace function durable.tell_dependents(bigint[], text, float8, bytea, text[], int[], smallint[], text[])
returns table (queue text, id bigint, priority smallint, eligible_at timestamptz, what text, claim_id uuid, fsm text, fsm_version int, step text,
               attempt int, crashes int, visit bigint, state jsonb, partition_key text, parent_id bigint, awaits text[], inbox boolean,
               children_total int, round int, journal text, cancellation jsonb) language sql volatile
set enable_hashjoin = off set enable_mergejoin = off as $$
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
$$;

-- commit_claim (0025): the limits of a step end with it.
create or replace function durable.commit_claim(
    r durable.gen_durable, late boolean, kind text, to_status text, to_step text, new_state text, new_result text, to_attempt int,
    advance int, delay float8, error jsonb, rekey boolean, new_key text, names text[], keeps boolean, then_step text, timeout float8,
    consumed bigint[], kept bigint[], boundary jsonb default null
) returns void language plpgsql volatile as $$
begin
    if r.cancellation is not null and to_status in ('done', 'failed') then  -- it compensated: however that ends, it was cancelled
        kind := 'cancelled';
        to_status := 'cancelled';
        new_result := null;
        error := coalesce(error, jsonb_build_object('text', r.cancellation ->> 'reason'));
    end if;
    if r.links > 1 then perform set_config('durable_actors.tells', 'on', true); end if;
    perform durable.commit_parks(
        array[r.id], array[r.claim_id], array[r.visit], array[to_status], array[to_step], array[new_state], array[new_result],
        array[to_attempt], array[advance], array[delay], array[error ->> 'text'], array[rekey], array[new_key], array[names::text],
        array[keeps], array[then_step], array[timeout], array[error ->> 'type'], array[error ->> 'traceback'], late, array[boundary::text]);
    if r.links > 1 then perform set_config('durable_actors.tells', '', true); end if;
    perform durable.check_written(r.id);
    if r.journal >= 2 or (r.journal = 1 and kind in ('retry', 'failed')) then
        perform durable.journal_outcomes(
            array[r.id], array[r.claim_id], array[kind], array[r.step], array[r.visit], array[r.attempt],
            case when r.journal < 3 then '{}' else array[durable.claim_age(r)] end, r.locked_by,
            array[r.round], array[case when r.journal >= 3 then r.lease_expires_at end], array[rekey], '{}', '{}');
    end if;
    if r.rate_limit is not null and advance > 0 then  -- a runner names no limits
        perform durable.write_limits(array[r.id], array[r.claim_id], array[null]);
    end if;
    if consumed <> '{}' then
        perform durable.consume_signals(array_fill(r.id, array[cardinality(consumed)]), consumed);
    end if;
    if to_status = 'awaiting_signal' and boundary is null then
        perform durable.recheck_awaits(array[r.id], kept);
    end if;
    if r.links > 1 and to_status in ('done', 'failed', 'cancelled') then
        perform durable.lock_owed(array[r.id]);
        perform durable.tell_dependents(array[r.id], null, null, null, '{}', '{}', '{}', '{}');
    end if;
    if r.parent_id is not null and to_status in ('done', 'failed', 'cancelled') then
        perform durable.join_parents(array[r.id]);
    end if;
    if r.partition_key is not null then
        perform durable.promote_siblings(array[r.partition_key]);
    end if;
end $$;

-- spawn_from_claim (0025): children may have a limit of attempts of their own; the limits of a step end with it.
create or replace function durable.spawn_from_claim(r durable.gen_durable, outcome jsonb, consumed bigint[]) returns void language plpgsql volatile as $$
declare
    children jsonb := outcome -> 'children';
    wanted jsonb := coalesce(outcome -> 'join', '"all"');
    odd text;
    inserted int := 0;
    added int;
    needed int;
begin
    if jsonb_typeof(children) <> 'array' or exists (select 1 from jsonb_array_elements(children) c where jsonb_typeof(c) <> 'object') then
        raise exception '"children" must be a list of objects' using errcode = 'RD004';
    end if;
    if wanted not in ('"all"', '"any_failed"') and (jsonb_typeof(wanted) <> 'number' or wanted::text !~ '^[1-9][0-9]{0,8}$') then
        raise exception '"join" must be "all", "any_failed" or a number of children: %', left(wanted::text, 200) using errcode = 'RD004';
    end if;
    if coalesce(outcome -> 'rest', '"leave"') not in ('"leave"', '"cancel"') then
        raise exception '"rest" must be "leave" or "cancel": %', left((outcome -> 'rest')::text, 200) using errcode = 'RD004';
    end if;
    select k into odd from jsonb_array_elements(children) c, jsonb_object_keys(c) k
     where k not in ('machine', 'version', 'step', 'state', 'queue', 'priority', 'partition_key', 'unique_key', 'unique_key_hex',
                     'unique_scope', 'eligible_at', 'schedule_in', 'tags', 'meta', 'journal', 'fingerprint', 'max_attempts') limit 1;
    if odd is not null then
        raise exception 'a child has no field "%"', odd using errcode = 'RD004';
    end if;
    perform durable.outcome_name(c, 'machine'), case when c ? 'step' then durable.outcome_name(c, 'step') end,
            case when c ? 'queue' then durable.outcome_name(c, 'queue') end, durable.outcome_seconds(c, 'schedule_in')
       from jsonb_array_elements(children) c;
    if exists (select 1 from jsonb_array_elements(children) c where c ->> 'max_attempts' !~ '^[1-9][0-9]{0,8}$') then
        raise exception '"max_attempts" of a child must be a whole number from 1 on' using errcode = 'RD004';
    end if;
    for part in 0 .. jsonb_array_length(children) / 5000 loop  -- as an engine: a statement is not too long
        select count(n.id) into added from (
            select array_agg(c.machine) as a1, array_agg(coalesce(c.version, 1)) as a2, array_agg(coalesce(c.step, 'start')) as a3,
                   array_agg(coalesce(c.state, '{}')::text) as a4, array_agg(coalesce(c.queue, 'default')) as a5,
                   array_agg(coalesce(c.priority, 0)::smallint) as a6, array_agg(c.partition_key) as a7, array_agg(k.key) as a8,
                   array_agg(case when k.key is null then '{}'
                                  else coalesce(c.unique_scope::text, '{runnable,executing,awaiting_signal,awaiting_children}') end) as a9,
                   array_agg(c.eligible_at) as a10, array_agg(c.schedule_in) as a11, array_agg(r.id) as a12, array_agg(r.visit + 1) as a13,
                   array_agg(c.tags::text) as a14, array_agg(c.meta::text) as a15,
                   array_agg(case coalesce(c.journal, r.journal::text) when 'off' then 0 when 'auto' then 2 when 'outcomes' then 2
                                  when 'claims' then 3 when 'full' then 4 else coalesce(c.journal, r.journal::text)::int end::smallint) as a16,
                   array_agg(c.fingerprint) as a17, array_agg(c.max_attempts) as a20
              from rows from (jsonb_to_recordset(children) as (
                       machine text, version int, step text, state jsonb, queue text, priority int, partition_key text, unique_key text,
                       unique_key_hex text, unique_scope text[], eligible_at timestamptz, schedule_in float8, tags text[], meta jsonb,
                       journal text, fingerprint text, max_attempts int)) with ordinality c
             cross join lateral (select coalesce(convert_to(c.unique_key, 'UTF8'), decode(c.unique_key_hex, 'hex')) as key) k
             where c.ordinality > part * 5000 and c.ordinality <= (part + 1) * 5000) i
         cross join lateral durable.insert_instances(i.a1, i.a2, i.a3, i.a4, i.a5, i.a6, i.a7, i.a8, i.a9, i.a10, i.a11, i.a12, i.a13,
                                                     i.a14, i.a15, i.a16, i.a17, '{}', '{}', i.a20, '{}', '{}') n
         where i.a1 is not null;
        inserted := inserted + added;
    end loop;
    needed := case when jsonb_typeof(wanted) = 'number' then least(wanted::text::int, inserted) else inserted end;
    perform durable.park_parent(
        r.id, durable.outcome_name(outcome, 'then'), (outcome -> 'state')::text, inserted, needed, wanted = '"any_failed"',
        durable.outcome_seconds(outcome, 'timeout'), r.step, r.attempt, r.locked_by, r.round,
        case when r.journal >= 3 then r.lease_expires_at end, null, null, coalesce(outcome ->> 'rest', '') = 'cancel');
    perform durable.check_written(r.id);
    if r.rate_limit is not null then
        perform durable.write_limits(array[r.id], array[r.claim_id], array[null]);
    end if;
    if consumed <> '{}' then
        perform durable.consume_signals(array_fill(r.id, array[cardinality(consumed)]), consumed);
    end if;
    if r.partition_key is not null then
        perform durable.promote_siblings(array[r.partition_key]);
    end if;
end $$;

-- claim_next (0025): throttled rows whose token has come are looked at, too.
create or replace function durable.claim_next(queue text, steps text[], owner text, lease interval default '5 minutes')
returns table (id bigint, claim_id uuid, token text, lease_until timestamptz, machine text, version int, step text, state jsonb,
               attempt int, visit bigint, idempotency_key text, partition_key text, parent_id bigint, awaited jsonb, signals jsonb,
               more_signals boolean, children jsonb, children_counts jsonb, decision jsonb, cancellation jsonb, dependencies jsonb)
language plpgsql volatile
set jit = off set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
set synchronous_commit = on as $$
#variable_conflict use_column
declare
    space text := (select n.nspname from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = 'durable.gen_durable'::regclass);
    seconds float8 := durable.lease_seconds(lease);
    known text[] := array(select m[1] || chr(31) || coalesce(m[2], '1')::int || chr(31) || m[3]
                            from unnest(steps) s, regexp_matches(s, '^(.+?)(?:@(\d{1,9}))?/([^/]+)$') m);
    secret text := encode(sha256(convert_to(gen_random_uuid()::text || gen_random_uuid() || gen_random_uuid(), 'UTF8')), 'hex');
    found_ids bigint[];
    found_keys text[];
    found_shelves text[];
    mine bigint[];
    tried bigint[] := '{}';
    look int := 100;
    seen bigint;
    freed text[];
    ended bigint[];
    shelved boolean := false;
    swept boolean := false;
    thawed bigint[];
    got bigint;
    key text;
begin
    perform durable.check_isolation();
    if queue is null or cardinality(known) is distinct from cardinality(steps) or known = '{}' or length(owner) not between 1 and 255
       or owner is null then
        raise exception 'claim_next needs a queue, steps ("machine/step" or "machine@version/step"), and an owner of 1 to 255 characters'
            using errcode = 'RD004';
    end if;
    select array_agg(distinct t.partition_key) filter (where t.partition_key is not null), array_agg(t.id) filter (where t.status in ('failed', 'cancelled'))
      into freed, ended from durable.reap_claims(20, '{}', null, '{}', space) t;
    if freed is not null then perform durable.promote_siblings(freed); end if;
    if ended is not null then
        perform durable.check_written(ended[1]), durable.join_parents(ended);
    end if;
    perform durable.expire_awaits(claim_next.queue, 100);
    if durable.has_cascades() then
        freed := array(select distinct c.partition_key from durable.cancel_children(5, 50) c where c.partition_key is not null);
        perform durable.promote_siblings(freed);
    end if;
    if exists (select 1 from durable.untold) then perform durable.tell_untold(100); end if;
    -- The pick decides it, in its own snapshot. This saves the search for rows that it would not take.
    known := array(select k from unnest(known) k where not exists (
        select 1 from durable.pauses p
         where p.queue = claim_next.queue and p.fsm in ('', split_part(k, chr(31), 1)) and durable.lasts(p.until)));
    if known = '{}' then return; end if;
    thawed := case when exists (select 1 from durable.limit_waits w where w.queue = claim_next.queue and w.next_at <= durable.now())
                   then array(select t.id from durable.thaw(space, claim_next.queue, 10) t where t.id is not null) end;
    loop
        with recursive p(priority) as (
            (select g.priority from durable.gen_durable g
              where durable.offered(g.status, g.hold) and g.queue = claim_next.queue order by g.priority limit 1)
            union all
            select (select g.priority from durable.gen_durable g
                     where durable.offered(g.status, g.hold) and g.queue = claim_next.queue and g.priority > p.priority
                     order by g.priority limit 1)
              from p where p.priority is not null
        ), head as materialized (
            select h.* from p cross join lateral (
                select g.id, g.priority, g.eligible_at, g.partition_key, g.fsm || chr(31) || g.fsm_version || chr(31) || g.step as at_step
                  from durable.gen_durable g
                 where durable.offered(g.status, g.hold) and g.queue = claim_next.queue and g.priority = p.priority
                   and durable.due(g.eligible_at)
                 order by g.eligible_at, g.id limit look) h
             where p.priority is not null limit look
        ), shelf as materialized (
            select s.* from unnest(known) m(at_step) cross join lateral (
                select g.id, g.priority, g.eligible_at, m.at_step from durable.gen_durable g
                 where g.status = 'runnable' and g.hold = 2 and g.queue = claim_next.queue
                   and g.fsm = split_part(m.at_step, chr(31), 1) and g.fsm_version = split_part(m.at_step, chr(31), 2)::int
                   and coalesce(g.shelved_step, '') = split_part(m.at_step, chr(31), 3) and durable.due(g.eligible_at)
                 order by g.priority, g.eligible_at, g.id limit 1) s
        )
        select array_agg(f.id), array_agg(f.partition_key), array_agg(f.shelf), (select count(*) from head)
          into found_ids, found_keys, found_shelves, seen
          from (select w.* from (select h.id, h.priority, h.eligible_at, h.partition_key, null::text as shelf from head h where h.at_step = any (known)
                                 union all
                                 select s.id, s.priority, s.eligible_at, null, s.at_step from shelf s
                                 union all
                                 select g.id, g.priority, g.eligible_at, g.partition_key, null from durable.gen_durable g where g.id = any (thawed)) w
                 where w.id <> all (tried)
                 order by w.priority, w.eligible_at, w.id limit greatest(look / 10, 100)) f;
        for i in 1 .. coalesce(cardinality(found_ids), 0) loop
            continue when found_ids[i] = any (tried);
            -- The rows of a key together: one of them may be claimed, the others are held behind it.
            mine := case when found_keys[i] is null then array[found_ids[i]]
                         else array(select u.id from unnest(found_ids, found_keys) u(id, key) where u.key = found_keys[i]) end;
            tried := tried || mine;
            begin
                select n.id, n.partition_key into got, key from durable.pick_instances(
                    claim_next.queue, cardinality(mine), 'runner:' || owner, seconds, known, '{}', '{}', '{}',
                    case when found_shelves[i] is null then mine else '{}' end, space,
                    case when found_shelves[i] is null then '{}' else array[found_shelves[i]] end,
                    sha256(convert_to(secret, 'UTF8'))) n where n.what = 'c';
                if key is not null and not pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || key, 0)) then
                    raise exception using errcode = 'RD000';
                end if;
            exception when sqlstate 'RD000' then got := null;
            end;
            if got is not null and durable.end_doomed(got) then got := null; end if;
            exit when got is not null;
        end loop;
        exit when got is not null;
        if found_ids is not null and cardinality(tried) < 2000 then
            look := 10000;
        elsif found_ids is null and look < 10000 and seen = look then
            look := 10000;
        elsif found_ids is null and seen = look and not shelved then
            shelved := true;
            perform durable.pick_instances(
                claim_next.queue, 1000, 'runner:' || owner, seconds, '{}', array_agg(q.priority), array_agg('-infinity'::timestamptz),
                array_agg((-9223372036854775808)::bigint), '{}', space, '{}', null)
               from (select distinct g.priority from durable.gen_durable g
                      where durable.offered(g.status, g.hold) and g.queue = claim_next.queue) q;
        elsif not swept then
            swept := true;
            freed := array(select k.key from durable.sweep_keys('', 100) k where k.stuck and k.key is not null);
            if freed = '{}' then return; end if;
            perform durable.promote_siblings(freed);
        else
            return;
        end if;
    end loop;
    return query select * from durable.claimed_row(got, secret);
end $$;
