-- One clock: every statement asks durable.now(). In production it is the server's clock, and the planner inlines it, so that
-- plans and costs are those of now() itself. A test bench replaces it by a clock that can be advanced.
-- Leases, renewals, reaping and nodes stay on the server's own clock, pg_catalog.now().

create function durable.now() returns timestamptz language sql stable parallel safe as $$ select pg_catalog.now() $$;

comment on function durable.now is 'durable_actors: the clock of delays, deadlines and records';

alter table durable.gen_durable
    alter column eligible_at set default durable.now(),
    alter column inserted_at set default durable.now(),
    alter column updated_at set default durable.now();
alter table durable.signals alter column inserted_at set default durable.now();

-- Whether a runnable row keeps its place in its partition key while it is held (`_store/holds.py` has the reasons). Paused rows
-- and rows that wait for others give it up: 4, 5. A shelved row (2) keeps it where its step is known. Inlined.
create function durable.keeps_place(hold smallint) returns boolean language sql immutable parallel safe as
    $$ select hold not in (4, 5) $$;

-- judge_siblings (0009; 0002 says how it works and why it is safe): by the one clock, and every move of a row counts in its `rev`.
create or replace function durable.judge_siblings(
    space text, known text[], gone text[], ks text[], ps smallint[], es timestamptz[], ids bigint[],
    out claim bigint[], out hold bigint[], out leave bigint[]
) language plpgsql volatile as $$
declare
    got boolean[];
    heal text[] := gone;
    verdict text;
    elder smallint;
    r record;
begin
    claim := '{}'; hold := '{}'; leave := '{}';
    if ks is null and gone = '{}' then return; end if;
    got := array(
        select pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || u.k, 1))
          from unnest(ks) with ordinality u(k, o) order by u.o);
    for r in  -- a new statement: a fresh snapshot, taken after all the locks
        select u.i, u.k, u.p, u.e, u.o,
               case when u.k = ks[u.o - 1] then null  -- the key's first row has decided
                    when not u.ok then 'busy'
                    when x.id is not null then 'executing'
                    when exists (select 1 from durable.gen_durable y
                                  where y.partition_key = u.k and y.status = 'executing') then 'busy'
                    when exists (select 1 from durable.gen_durable y
                                  where y.partition_key = u.k and y.status = 'runnable'
                                    and y.eligible_at <= durable.now() and durable.keeps_place(y.hold)
                                    and (y.priority, y.eligible_at, y.id) < (u.p, u.e, u.i)
                                    and y.fsm || chr(31) || y.fsm_version || chr(31) || y.step = any (known))
                         then 'earlier'
                    else 'free' end as verdict
          from unnest(ks, ps, es, ids, got) with ordinality u(k, p, e, i, ok, o)
          left join lateral (
              select y.id from durable.gen_durable y
               where u.ok and u.k is distinct from ks[u.o - 1]
                 and y.partition_key = u.k and y.status = 'executing'
                 for no key update skip locked) x on true
         order by u.o
    loop
        if r.verdict is not null then
            verdict := r.verdict;
            if verdict = 'free' then
                claim := claim || r.i;
                continue;
            elsif verdict = 'earlier' then
                select y.hold into elder from durable.gen_durable y
                 where y.partition_key = r.k and y.status = 'runnable' and y.eligible_at <= durable.now() and durable.keeps_place(y.hold)
                   and (y.priority, y.eligible_at, y.id) < (r.p, r.e, r.i)
                   and y.fsm || chr(31) || y.fsm_version || chr(31) || y.step = any (known)
                 order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked;
                if not found then
                    verdict := 'busy';
                elsif elder = 1 then
                    heal := heal || r.k;
                end if;
            end if;
        end if;
        if verdict <> 'busy' then
            hold := hold || r.i;
        else
            leave := leave || r.i;
        end if;
    end loop;
    -- The elder may be held with nothing left to release it: a promotion skips a row that a concurrent pick
    -- has locked and then rejects. Whoever meets such a key offers its first held row again. So does who shelves a row:
    -- it may be the one that a promotion has offered, and the rows held behind it would wait for the sweep.
    if heal <> '{}' then
        update durable.gen_durable g set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now() where g.id = any (array(
            select h.id from unnest(heal) u(k)
             cross join lateral (
                 select y.id from durable.gen_durable y
                  where y.partition_key = u.k and y.status = 'runnable' and y.hold = 1
                  order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h));
    end if;
end $$;

-- wait_for_work (0006): by the one clock.
create or replace function durable.wait_for_work(queues text[], every float8, patience float8)
returns table (found_queue text, found_priority smallint)
language plpgsql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
    ahead interval := durable.now() - pg_catalog.now();  -- zero, but on a test bench
    until timestamptz := clock_timestamp() + make_interval(secs => patience);
    pause float8 := every;
    began timestamptz;
    due   timestamptz;
    hit   boolean := false;
begin
    loop
        perform pg_sleep(least(pause, greatest(extract(epoch from until - clock_timestamp())::float8, 0)));
        began := clock_timestamp();
        foreach found_queue in array queues loop
            select g.priority, g.eligible_at into found_priority, due from durable.gen_durable g
             where g.status = 'runnable' and g.hold = 0 and g.queue = found_queue
             order by g.priority, g.eligible_at, g.id limit 1;
            while found_priority is not null loop
                if due <= began + ahead then
                    hit := true;
                    return next;
                    exit;
                end if;
                select g.priority, g.eligible_at into found_priority, due from durable.gen_durable g
                 where g.status = 'runnable' and g.hold = 0 and g.queue = found_queue and g.priority > found_priority
                 order by g.priority, g.eligible_at, g.id limit 1;
            end loop;
        end loop;
        exit when hit or clock_timestamp() >= until;
        pause := greatest(every, 20 * extract(epoch from clock_timestamp() - began)::float8);
    end loop;
end $$;

-- send_signals (0003): by the one clock. A row that has ended, in whatever way, is no target.
create or replace function durable.send_signals(targets bigint[], keys bytea[], names text[], payloads jsonb[], dedups text[])
returns table (ord bigint, target bigint, outcome text, queue text, woken boolean)
language plpgsql volatile as $$
declare
    resolved bigint[];
begin
    resolved := array(
        select coalesce(u.target, k.id)
          from unnest(targets, keys) with ordinality u(target, key, o)
          left join lateral (
              select g.id from durable.gen_durable g where u.target is null and g.unique_guard = u.key) k on true
         order by u.o);
    perform 1 from durable.gen_durable g where g.id = any (resolved) order by g.id for no key update;
    return query
    with input as materialized (
        select u.o, g.id, u.name, u.payload, u.dedup, g.queue, g.status
          from unnest(resolved, names, payloads, dedups) with ordinality u(target, name, payload, dedup, o)
          left join durable.gen_durable g on g.id = u.target and g.finished_at is null
    ), sent as (
        insert into durable.signals as s (target_id, name, payload, dedup_key)
        select i.id, i.name, coalesce(i.payload, 'null'), i.dedup from input i where i.id is not null order by i.o
        on conflict (target_id, dedup_key) where dedup_key is not null do nothing
        returning s.id as signal_id, s.target_id, s.name, s.dedup_key
    ), wake as (
        update durable.gen_durable g
           set inbox = true,
               status = case when w.hit then 'runnable' else g.status end,
               eligible_at = case when w.hit then durable.now() else g.eligible_at end,
               step = case when w.hit then coalesce(g.await_step, g.step) else g.step end,
               await_step = case when w.hit then null else g.await_step end,
               await_deadline = case when w.hit then null else g.await_deadline end,
               rev = case when w.hit then least(g.rev, 9223372036854775806) + 1 else g.rev end,
               updated_at = durable.now()
          from (select b.target_id,
                       (select y.status = 'awaiting_signal' and y.awaits && array_agg(b.name)
                          from durable.gen_durable y where y.id = b.target_id) as hit
                  from sent b group by b.target_id) w
         where g.id = w.target_id and (w.hit or not g.inbox)
        returning g.id, w.hit
    ), fresh as (
        -- Of several with one new dedup key in one call the first was sent.
        select i.o, row_number() over (partition by i.id, i.dedup order by i.o) as nth,
               exists (select 1 from sent b where b.target_id = i.id and b.dedup_key = i.dedup) as is_new
          from input i where i.dedup is not null
    )
    select i.o, i.id,
           case when i.id is null then 'no_target'
                when i.dedup is null or (f.is_new and f.nth = 1) then 'sent'
                else 'duplicate' end,
           i.queue, coalesce(k.hit, false)
      from input i
      left join fresh f on f.o = i.o
      left join wake k on k.id = i.id
     order by i.o;
end $$;
