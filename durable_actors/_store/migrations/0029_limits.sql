-- transaction: none
-- Limits: rates and slots that steps share over all nodes. docs/internals/limits.md says how they work.
-- Every statement can be repeated: an interrupted migration begins again.

-- The uses of limits by the current step of an instance are in `rate_limit` (0001): a text, whose parts are separated by chr(31). A part is
-- "name" or "name:key", after "!" if it takes a slot, and before chr(30) and a number if its weight is not that of the column `weight`.
-- Why a throttled row (hold = 3) waits: the use that frees last.
alter table durable.gen_durable add column if not exists limited_by text;

comment on column durable.gen_durable.limited_by is 'durable_actors: the limit, with its key, that a throttled instance waits for';

-- The use that takes a slot; null: none. A name and a key have 356 characters at most; a longer text was written by a hand.
create or replace function durable.slot_of(rate_limit text) returns text language sql immutable parallel safe as $$
    select left(substring(rate_limit from '(?:^|' || chr(31) || ')!([^' || chr(30) || chr(31) || ']*)'), 360) $$;

comment on function durable.slot_of is 'durable_actors: the slot that a step takes';

-- Throttled rows by what they wait for, in the order of the pick. Dropped first: an interrupted build leaves an index that no query uses.
drop index concurrently if exists durable.gen_durable_throttled;
create index concurrently gen_durable_throttled on durable.gen_durable (queue, limited_by, priority, eligible_at, id)
    where status = 'runnable' and hold = 3;

-- Who has the slots of a key: executing rows, and nothing else. So no slot can leak.
drop index concurrently if exists durable.gen_durable_slots;
create index concurrently gen_durable_slots on durable.gen_durable (durable.slot_of(rate_limit))
    where status = 'executing' and rate_limit is not null;

-- The definitions. What counts is in the columns from `interval` on: the operator's override, else what the code has declared.
create table if not exists durable.limits (
    name        text primary key,
    declared    jsonb,                                        -- by the code of a node; null: only an operator knows it
    revision    text,                                         -- of that declaration: a node that starts writes it only if its own differs
    declared_at timestamptz,
    declared_by text,
    override    jsonb,                                        -- by an operator: wins until it is cleared
    set_at      timestamptz,
    set_by      text,
    reason      text,
    interval    float8,                                       -- seconds for one token; null: no rate
    burst       float8 not null default 1,                    -- tokens that an idle key has
    slots       int,                                          -- null: no slots
    on_full     text not null default 'wait',                 -- what finds no token and no slot waits, or ends as cancelled: 'drop'
    held        text not null default 'step'                  -- how long a slot is held: by its step, or until the 'instance' ends
);

comment on table durable.limits is 'durable_actors: definitions of limits';

-- The level of each key. `tat` is the theoretical arrival time of GCRA: until then the tokens are spent. `at` is when it was written: a clock
-- that has gone back since then moves `tat` back by as much. Written only by who holds the advisory lock of its key; so no row lock is waited for.
create table if not exists durable.limit_keys (
    key         text primary key,
    tat         timestamptz not null,
    at          timestamptz not null,
    blocked     timestamptz                                   -- until when an API has told us to wait (`RateLimited`)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

comment on table durable.limit_keys is 'durable_actors: the level of each key of a limit';

-- Queues in which rows are throttled, and when to look at them again: the time of the next token, or a while if only an end can free them.
create table if not exists durable.limit_waits (
    key         text not null,
    queue       text not null,
    next_at     timestamptz not null,
    primary key (key, queue)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

comment on table durable.limit_waits is 'durable_actors: when to look at throttled instances';

-- Slots that instances keep until they end (`held` = 'instance'): an instance has one at most. Written when the pick grants the slot; deleted by
-- a trigger when the instance ends. A line of an instance that has ended counts for nothing.
create table if not exists durable.kept_slots (
    instance_id bigint primary key,
    key         text not null
) with (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

comment on table durable.kept_slots is 'durable_actors: slots that instances keep until they end';

create index if not exists kept_slots_key on durable.kept_slots (key);

-- Who has a slot of a key: what executes and uses it, and what keeps one.
create or replace function durable.holders(of_key text) returns setof bigint language sql stable as $$
    select y.id from durable.gen_durable y where durable.slot_of(y.rate_limit) = of_key and y.status = 'executing' and y.rate_limit is not null
    union all
    select s.instance_id from durable.kept_slots s
     cross join lateral (  -- one look-up for each: a join might read all ids
        select y.status, y.rate_limit from durable.gen_durable y where y.id = s.instance_id limit 1) y
     where s.key = of_key and y.status not in ('done', 'failed', 'cancelled')
       and (y.status = 'executing' and durable.slot_of(y.rate_limit) = of_key) is not true $$;

comment on function durable.holders is 'durable_actors: the instances that have a slot';

create index if not exists limit_waits_due on durable.limit_waits (queue, next_at);

-- The uses in a `rate_limit`: a hand may have written anything there, and nothing of it may refuse the pick of its queue.
create or replace function durable.uses_of(rate_limit text, weight int) returns table (n int, key text, slot boolean, weight float8)
language sql immutable parallel safe as $$
    select u.n::int, left(ltrim(split_part(u.part, chr(30), 1), '!'), 360) collate "C", left(u.part, 1) = '!',
           greatest(case when split_part(u.part, chr(30), 2) ~ '^[0-9]{1,9}$' then split_part(u.part, chr(30), 2)::float8
                         else uses_of.weight end, 1)
      from unnest(string_to_array(left(uses_of.rate_limit, 12000), chr(31))) with ordinality u(part, n) where u.n <= 32 $$;

-- Seconds of tokens that are spent, now: 0 for a key at rest. 1e8: no bucket is that deep; a wild clock must not overflow. Stable, as date_part
-- of an instant is: else Postgres would call it for each key (1.6 µs) instead of writing it into the statement (0.2 µs).
create or replace function durable.spent(tat timestamptz, at timestamptz, present timestamptz) returns float8 language sql stable parallel safe as $$
    select least(greatest(date_part('epoch', tat) - greatest(date_part('epoch', at), date_part('epoch', present)), 0), 1e8) $$;

-- The time of a change of a level. Time is that of the transaction, and whoever decides next may have begun earlier: then a level that is written
-- as of its own beginning would be too low by the difference. A second: longer than that no decision takes; a clock that went back is believed.
create or replace function durable.moment(at timestamptz, present timestamptz) returns timestamptz language sql stable parallel safe as $$
    select case when at > present and at < present + interval '1 second' then at else present end $$;

-- Whether a limit was full for this visit (`on_full` = 'drop'): nothing of it runs.
create or replace function durable.is_dropped(cancellation jsonb, visit bigint) returns boolean language sql immutable parallel safe as $$
    select cancellation ? 'limit' and cancellation ->> 'visit' = visit::text $$;

comment on function durable.is_dropped is 'durable_actors: whether a limit was full for this visit';

-- End rows for which a limit is full. They are locked by the caller and stay on offer: whoever claims one ends it.
create or replace function durable.drop_rows(ids bigint[], full_of text[]) returns void language sql volatile as $$
    update durable.gen_durable g
       set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now(),
           cancellation = jsonb_build_object('reason', format('the limit %s is full', u.key), 'at', durable.now(), 'limit', u.key, 'visit', g.visit)
      from unnest(ids, full_of) u(id, key)
     where g.id = u.id
    returning case when g.journal >= 2 then durable.note(g.id, g.rev, 'dropped', g.step, null, g.visit, g.attempt, g.round,
                  further => jsonb_build_object('columns', jsonb_build_object('cancellation', g.cancellation))) end $$;

comment on function durable.drop_rows is 'durable_actors: cancel rows for which a limit is full';

-- Throttle what is like a row that has just been throttled, and comes after it: nobody overtakes, so it would be throttled, too. A pick looks at
-- as many rows as there are free slots, ten or so: a backlog of a million would hold up what is behind it for a hundred thousand picks.
-- Rows with a partition key are left to judge_siblings, cancelled ones to whoever ends them; who keeps a slot does not wait for one. `aside`: what
-- the caller shelves in the same statement, which may write a row once. Never waits.
create or replace function durable.throttle_alike(in_queue text, instance bigint, by_key text, aside bigint[]) returns void language sql volatile as $$
    with one as materialized (
        select o.priority, o.eligible_at, o.id, o.rate_limit, o.weight from durable.gen_durable o where o.id = instance
    ), ahead as materialized (
        select c.id from one cross join lateral (
            select y.id from durable.gen_durable y
             where durable.offered(y.status, y.hold) and y.queue = in_queue and y.priority = one.priority
               and durable.due(y.eligible_at) and (y.eligible_at, y.id) > (one.eligible_at, one.id)
             order by y.eligible_at, y.id limit 500) c
    ), mine as materialized (
        select z.id from durable.gen_durable z, one
         where z.id = any (array(select a.id from ahead a)) and durable.offered(z.status, z.hold) and z.rate_limit = one.rate_limit
           and z.weight = one.weight and z.partition_key is null and z.cancellation is null and z.id <> all (aside)
           and not exists (select 1 from durable.kept_slots s where s.instance_id = z.id)
         order by z.id for no key update of z skip locked
    )
    update durable.gen_durable g set hold = 3, limited_by = by_key, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
      from mine m
     where g.id = m.id
    returning case when g.journal >= 3 then durable.note(g.id, g.rev, 'throttled', g.step, null, g.visit, g.attempt, g.round,
                  further => jsonb_build_object('limited_by', g.limited_by)) end $$;

comment on function durable.throttle_alike is 'durable_actors: throttle what comes after a throttled row and is like it';

-- Which of the rows that a pick may claim may run by their limits; `ids` in the order of the pick, all locked by the caller.
-- Returns those to claim, charged; those to throttle, each with the use that it waits under; those to leave for a later look, because somebody
-- else decides about a key of theirs right now. A row needs all its uses, or none is charged.
-- `patient`: the caller can claim nothing else. `aside`: the rows of its window that it shelves; nothing is done to them here.
--   One decision at a time for a key: an advisory try-lock until the end of the transaction. It is decided with a snapshot that is younger than
-- the lock, so whatever was charged or claimed under that lock before is seen.
--   Rates: GCRA. A row is admitted while the tokens that are spent, and its own, fit into the burst. One that weighs more than the burst goes
-- when nothing is spent, and pays in full: it is slow, and never frozen. Nobody overtakes: what comes after a row that has to wait for a key waits, too,
-- and so does what comes after a throttled row of its queue.
--   What is dropped (`on_full`) gets a cancellation here, which names the limit: it stays on offer, and whoever claims it ends it. What has begun
-- in this visit waits instead, and so does what meets a key whose API has told a step to wait.
--   Slots: the executing rows are counted, and those that keep one; an instance that keeps its slot needs no other. A row is throttled only if the row of one holder could be locked, or if the caller claims one itself: that
-- one ends after this transaction, and its end (free_slot) finds what is throttled here. Else it is left.
--   Never waits for a lock. Who is patient tries again for 20 ms.
create or replace function durable.judge_limits(
    space text, in_queue text, ids bigint[], patient boolean, aside bigint[],
    out claim bigint[], out throttle bigint[], out under text[], out leave bigint[]
) language plpgsql volatile as $$
declare
    present timestamptz := durable.now();
    began timestamptz := clock_timestamp();
    keys text[]; got boolean[]; weights float8[];
    u_row int[]; u_key int[]; u_slot boolean[]; u_weight float8[];
    interval_ float8[]; burst float8[]; used float8[]; blocked float8[]; slots int[]; free int[]; known boolean[];
    head_p smallint[]; head_e timestamptz[]; head_i bigint[]; waits boolean[];
    charged boolean[]; full_ boolean[]; pinned boolean[]; took int[]; next_in float8[]; drops boolean[]; held text[];
    r record; u int := 1; first int; k int; wait float8; worst float8; waits_by int; busy boolean; dropped_by int;
    plain boolean; go boolean[];
    left_over float8; dropped bigint[] := '{}'; full_of text[] := '{}'; keeps bigint[] := '{}'; keeps_of text[] := '{}'; waiting int[];
begin
    claim := '{}'; throttle := '{}'; under := '{}'; leave := '{}';
    if ids is null then return; end if;
    -- Most picks: each row has one rate, and its key lets all of its rows go. That is decided by key; no row is looked at by itself.
    select array_agg(k.key), array_agg(k.weight), array_agg(k.got), bool_and(k.plain) into keys, weights, got, plain
      from (select q.key, q.weight, q.plain,
                   q.plain and pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || q.key, 2)) as got
              from (select left(split_part(g.rate_limit, chr(30), 1), 360) collate "C" as key,
                           sum(greatest(case when split_part(g.rate_limit, chr(30), 2) ~ '^[0-9]{1,9}$'
                                             then split_part(g.rate_limit, chr(30), 2)::float8 else g.weight end, 1)) as weight,
                           bool_and(g.rate_limit <> '' and left(g.rate_limit, 1) <> '!' and strpos(g.rate_limit, chr(31)) = 0
                                    and octet_length(g.rate_limit) < 1000 and g.cancellation is null) as plain
                      from durable.gen_durable g where g.id = any (ids) group by 1 order by 1 offset 0) q offset 0) k;
    if plain then
        -- All keys are decided about elsewhere, and there is nothing else to claim: look again, for 20 ms at most, in no queue of a lock. Leaving
        -- a window costs what claiming it costs: with eight nodes on one key, those that left their rows took the time of the one that got it.
        while patient and not true = any (got) and clock_timestamp() < began + interval '20 ms' loop
            perform pg_sleep(0.001);
            for k in 1 .. cardinality(keys) loop
                got[k] := pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || keys[k], 2));
            end loop;
        end loop;
        -- A new statement: a fresh snapshot, taken after all the locks.
        with level as materialized (
            select v.*, v.interval is null or v.used <= v.burst * v.interval + 1e-6 as fits from (
                select q.key, q.o, l.interval, l.burst, coalesce(durable.spent(s.tat, s.at, present), 0) + q.weight * l.interval as used,
                       q.ok and l.name is not null and w.waits is null
                       and coalesce(durable.spent(s.blocked, s.at, present), 0) <= 1e-6 as free
                  from unnest(keys, weights, got) with ordinality q(key, weight, ok, o)
                  left join durable.limits l on l.name = split_part(q.key, ':', 1)
                  left join durable.limit_keys s on s.key = q.key
                  left join lateral (  -- a look-up for each: a join might compare each key with all that wait
                    select true as waits from durable.limit_waits x where x.key = q.key and x.queue = in_queue limit 1) w on true) v
        ), paid as (
            insert into durable.limit_keys as s (key, tat, at)
            select v.key, present + make_interval(secs => v.used), present from level v where v.free and v.fits and v.interval is not null
                on conflict (key) do update
                   set tat = durable.moment(s.at, excluded.at) + (excluded.tat - excluded.at), at = durable.moment(s.at, excluded.at),
                       blocked = case when s.blocked > s.at
                                      then durable.moment(s.at, excluded.at) + (s.blocked - greatest(s.at, durable.moment(s.at, excluded.at))) end
        )
        select array_agg(v.free and v.fits order by v.o) into go from level v;
        if true = all (go) then
            claim := ids;
            return;
        end if;
        select coalesce(array_agg(i.id) filter (where q.go), '{}'), coalesce(array_agg(i.id) filter (where not q.ok), '{}'),
               array_agg(i.id order by i.o) filter (where q.ok and not q.go)
          into claim, leave, ids
          from unnest(ids) with ordinality i(id, o)
          join durable.gen_durable g on g.id = i.id
          join unnest(keys, got, go) q(key, ok, go) on q.key = left(split_part(g.rate_limit, chr(30), 1), 360) collate "C";
        if ids is null then return; end if;
    end if;
    select array_agg(x.o order by x.o, x.n), array_agg(x.k order by x.o, x.n), array_agg(x.slot order by x.o, x.n), array_agg(x.weight order by x.o, x.n)
      into u_row, u_key, u_slot, u_weight
      from (select i.o::int as o, s.n, s.slot, s.weight, (dense_rank() over (order by s.key))::int as k
              from unnest(ids) with ordinality i(id, o)
              join durable.gen_durable g on g.id = i.id
             cross join lateral durable.uses_of(g.rate_limit, g.weight) s) x;
    keys := array(select distinct s.key from durable.gen_durable g cross join lateral durable.uses_of(g.rate_limit, g.weight) s
                   where g.id = any (ids) order by s.key);
    got := array(select pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || q.key, 2))
                   from unnest(keys) with ordinality q(key, o) order by q.o);
    -- A new statement: a fresh snapshot, taken after all the locks.
    select array_agg(l.name is not null order by q.o), array_agg(l.interval order by q.o), array_agg(l.burst order by q.o),
           array_agg(coalesce(durable.spent(s.tat, s.at, present), 0) order by q.o),
           array_agg(coalesce(durable.spent(s.blocked, s.at, present), 0) order by q.o),
           array_agg(l.slots order by q.o), array_agg(l.slots - n.taken order by q.o),
           array_agg(l.on_full = 'drop' order by q.o), array_agg(l.held order by q.o),
           array_agg(h.priority order by q.o), array_agg(h.eligible_at order by q.o), array_agg(h.id order by q.o), array_agg(w.key is not null order by q.o)
      into known, interval_, burst, used, blocked, slots, free, drops, held, head_p, head_e, head_i, waits
      from unnest(keys, got) with ordinality q(key, ok, o)
      left join durable.limits l on l.name = split_part(q.key, ':', 1)
      left join durable.limit_keys s on s.key = q.key
      left join durable.limit_waits w on w.key = q.key and w.queue = in_queue
      left join lateral (select count(*)::int as taken from (select 1 from durable.holders(q.key) limit coalesce(l.slots, 0)) c) n
             on l.slots is not null
      left join lateral (select y.priority, y.eligible_at, y.id from durable.gen_durable y
          where q.ok and y.status = 'runnable' and y.hold = 3 and y.queue = in_queue and y.limited_by = q.key and y.id <> all (ids)
          order by y.priority, y.eligible_at, y.id limit 1) h on w.key is not null;
    charged := array_fill(false, array[cardinality(keys)]); full_ := charged; pinned := charged;
    took := array_fill(0, array[cardinality(keys)]); next_in := array_fill(null::float8, array[cardinality(keys)]);
    for r in select i.o::int as o, g.id, g.priority, g.eligible_at, g.attempt > 0 or g.crashes > 0 or g.interruptions > 0 or g.round > 0 as began,
                    coalesce(g.cancellation ? 'upstream' or durable.is_dropped(g.cancellation, g.visit), false) as ends,
                    case when strpos(g.rate_limit, '!') > 0 then (select s.key from durable.kept_slots s where s.instance_id = g.id) end as kept
               from unnest(ids) with ordinality i(id, o) join durable.gen_durable g on g.id = i.id order by i.o loop
        first := u;
        worst := -1; waits_by := null; busy := false; dropped_by := null; waiting := '{}';
        while u <= coalesce(cardinality(u_row), 0) and u_row[u] = r.o loop
            k := u_key[u];
            if not got[k] then
                busy := true;
            elsif u_slot[u] and keys[k] = r.kept then
                wait := case when blocked[k] > 1e-6 then blocked[k] else -1 end;
            elsif not known[k] then
                wait := 1e9;
            elsif head_i[k] is not null and (head_p[k], head_e[k], head_i[k]) < (r.priority, r.eligible_at, r.id) then
                wait := 0;
            elsif u_slot[u] then
                wait := case when slots[k] is not null and free[k] - took[k] <= 0 then 1e8 when blocked[k] > 1e-6 then blocked[k] else -1 end;
            elsif full_[k] then
                wait := next_in[k];
            else
                wait := greatest(blocked[k], case when interval_[k] is null then 0
                            else used[k] + least(u_weight[u], burst[k]) * interval_[k] - burst[k] * interval_[k] end);
                wait := case when wait <= 1e-6 then -1 else wait end;
            end if;
            if not busy and wait >= 0 then
                if wait > worst then worst := wait; waits_by := k; end if;
                if not u_slot[u] then waiting := waiting || k; end if;
                if drops[k] and blocked[k] <= 0 and not r.began then dropped_by := k; end if;
                next_in[k] := least(next_in[k], case when wait >= 1e9 then 60 when wait >= 1e8 then 2 else wait end);
            end if;
            u := u + 1;
        end loop;
        if waits_by is not null and dropped_by is null and not r.ends then  -- those behind it wait, too
            foreach k in array waiting loop full_[k] := true; end loop;
        end if;
        if r.ends then
            claim := claim || r.id;  -- whoever claims it ends it: that needs no token
        elsif busy then
            leave := leave || r.id;
        elsif waits_by is null then
            claim := claim || r.id;
            for n in first .. u - 1 loop
                k := u_key[n];
                if u_slot[n] then
                    continue when keys[k] = r.kept;
                    took[k] := took[k] + 1;
                    if held[k] = 'instance' then
                        keeps := keeps || r.id; keeps_of := keeps_of || keys[k];
                    end if;
                elsif interval_[k] is not null then
                    used[k] := used[k] + u_weight[n] * interval_[k];
                    charged[k] := true;
                end if;
            end loop;
        elsif dropped_by is not null then
            leave := leave || r.id; dropped := dropped || r.id; full_of := full_of || keys[dropped_by];
        else
            if worst = 1e8 and took[waits_by] = 0 and not pinned[waits_by] then
                perform 1 from durable.gen_durable y
                  where durable.slot_of(y.rate_limit) = keys[waits_by] and y.status = 'executing' and y.rate_limit is not null
                  limit 1 for no key update skip locked;
                pinned[waits_by] := found;
                if not found then
                    perform 1 from durable.kept_slots s where s.key = keys[waits_by] limit 1 for update skip locked;
                    pinned[waits_by] := found;
                end if;
            end if;
            if worst = 1e8 and took[waits_by] = 0 and not pinned[waits_by] then
                leave := leave || r.id;
            else
                throttle := throttle || r.id;
                under := under || keys[waits_by];
            end if;
        end if;
    end loop;
    if cardinality(throttle) > cardinality(claim) and not coalesce(drops[array_position(keys, under[cardinality(under)])], false) then
        perform durable.throttle_alike(in_queue, throttle[cardinality(throttle)], under[cardinality(under)], aside);
    end if;
    if dropped <> '{}' then
        perform durable.drop_rows(dropped, full_of);
    end if;
    if keeps <> '{}' then
        insert into durable.kept_slots as s (instance_id, key) select c.id, c.key from unnest(keeps, keeps_of) c(id, key)
            on conflict (instance_id) do update set key = excluded.key;
    end if;
    insert into durable.limit_keys as s (key, tat, at)
    select c.key, present + make_interval(secs => c.used), present
      from unnest(keys, used, charged) c(key, used, charged) where c.charged
        on conflict (key) do update
           set tat = durable.moment(s.at, excluded.at) + (excluded.tat - excluded.at), at = durable.moment(s.at, excluded.at),
               blocked = case when s.blocked > s.at
                              then durable.moment(s.at, excluded.at) + (s.blocked - greatest(s.at, durable.moment(s.at, excluded.at))) end;
    -- What is throttled now or was before is looked at when the next token comes. Nobody else can throttle under these keys before this
    -- transaction ends: so a queue in which nothing is throttled any more can be forgotten.
    -- A line that somebody has locked is being set to now, because a slot is free: it stays so.
    update durable.limit_waits w set next_at = present + make_interval(secs => c.next_in)
      from unnest(keys, got, waits, next_in) c(key, ok, waits, next_in)
     where c.ok and c.waits and c.key = any (under) and w.queue = in_queue and w.key = c.key
       and w.key in (select x.key from durable.limit_waits x where x.queue = in_queue and x.key = any (under) for update skip locked);
    insert into durable.limit_waits as w (key, queue, next_at)
    select c.key, in_queue, present + make_interval(secs => c.next_in)
      from unnest(keys, got, waits, next_in) c(key, ok, waits, next_in) where c.ok and not c.waits and c.key = any (under)
        on conflict (key, queue) do update set next_at = excluded.next_at;
    for k in select i.i from generate_subscripts(keys, 1) i(i) where got[i.i] and waits[i.i] and keys[i.i] <> all (under) loop
        perform 1 from durable.limit_waits w where w.key = keys[k] and w.queue = in_queue for update skip locked;
        continue when not found;
        if exists (select 1 from durable.gen_durable y
                    where y.status = 'runnable' and y.hold = 3 and y.queue = in_queue and y.limited_by = keys[k]
                      and y.id <> all (claim) and y.id <> all (throttle)) then
            left_over := greatest(blocked[k], case when interval_[k] is null then 0 else used[k] + (1 - burst[k]) * interval_[k] end, 0);
            update durable.limit_waits w
               set next_at = present + make_interval(secs => case when slots[k] is not null and free[k] - took[k] <= 0 then greatest(left_over, 2) else left_over end)
             where w.key = keys[k] and w.queue = in_queue;
        else
            delete from durable.limit_waits w where w.key = keys[k] and w.queue = in_queue;
        end if;
    end loop;
end $$;

comment on function durable.judge_limits is 'durable_actors: which rows of a pick may run by their limits';

-- Throttled rows of a queue to pick again: of each use whose time has come as many as it may let go, in the order of the pick. The pick
-- decides (judge_limits): what is returned here is locked by nobody. `soon`, in a row of its own: seconds until the next use has its time.
-- A use under which nothing is throttled any more (cancelled, paused, deleted) is forgotten, under the lock of its key.
-- `ended`: slots of steps that have ended meanwhile. Their lines may not be due: the trigger skips a line that a pick has locked, and that pick
-- did not see the end. So they are looked at anyway, and let go what has a slot.
create or replace function durable.thaw(space text, in_queue text, most int, ended text[] default '{}') returns table (id bigint, soon float8)
language plpgsql volatile as $$
declare
    present timestamptz := durable.now();
    r record;
    found_some boolean;
    room int := most;
begin
    for r in
        select w.key, l.name is null as strange, l.interval, l.burst, l.slots, coalesce(durable.spent(s.tat, s.at, present), 0) as used,
               w.next_at <= present as due
          from ((select x.key, x.next_at from durable.limit_waits x where x.queue = in_queue and x.next_at <= present order by x.next_at limit most)
                union all
                (select x.key, x.next_at from durable.limit_waits x where x.queue = in_queue and x.key = any (ended) and x.next_at > present)) w
          left join durable.limits l on l.name = split_part(w.key, ':', 1)
          left join durable.limit_keys s on s.key = w.key
         where w.next_at <= present or l.slots is not null and coalesce(durable.spent(s.blocked, s.at, present), 0) <= 0
         order by w.next_at
    loop
        exit when room <= 0;
        found_some := false;
        for thaw.id in
            select y.id from durable.kept_slots s join durable.gen_durable y on y.id = s.instance_id
             where s.key = r.key and y.status = 'runnable' and y.hold = 3 and y.queue = in_queue and y.limited_by = r.key and y.eligible_at <= present
            union
            (select y.id from durable.gen_durable y
             where y.status = 'runnable' and y.hold = 3 and y.queue = in_queue and y.limited_by = r.key and y.eligible_at <= present
             order by y.priority, y.eligible_at, y.id
             limit greatest(least(room, case when r.strange then 1 else least(
                 floor(case when r.interval > 0 then (r.burst * r.interval - r.used) / r.interval + 1e-6 else room end),
                 r.slots - (select count(*) from (select 1 from durable.holders(r.key) limit r.slots) c)) end), r.due::int))
        loop
            found_some := true;
            room := room - 1;
            return next;
        end loop;
        if r.due and not found_some and pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || r.key, 2)) then
            -- A new statement: what was throttled under the lock before is seen.
            delete from durable.limit_waits w
             where w.queue = in_queue
               and w.key in (select x.key from durable.limit_waits x where x.key = r.key and x.queue = in_queue for update skip locked)
               and not exists (select 1 from durable.gen_durable y
                                where y.status = 'runnable' and y.hold = 3 and y.queue = in_queue and y.limited_by = r.key);
        end if;
    end loop;
    id := null;
    select extract(epoch from w.next_at)::float8 - extract(epoch from present)::float8 into soon
      from durable.limit_waits w where w.queue = in_queue and w.next_at > present order by w.next_at limit 1;
    if found then return next; end if;
end $$;

comment on function durable.thaw is 'durable_actors: throttled rows whose token has come';

-- The queues in which rows wait for a slot of this key look at once.
create or replace function durable.expect_slot(of_key text) returns void language sql volatile as $$
    update durable.limit_waits w set next_at = durable.now()
     where (w.key, w.queue) in (select x.key, x.queue from durable.limit_waits x
                                 where x.key = of_key and x.next_at > durable.now() for update skip locked) $$;

comment on function durable.expect_slot is 'durable_actors: a slot may be free';

-- A step that has a slot ends, in whatever way: commit, park, reap, release, crash, cancel, a runner, SQL by hand; a commit may delete its row
-- (`keep=0`). So does what an instance keeps, when it ends. The queues in which rows wait for that slot look at once. Triggers, because none of these can forget them; rows without limits fire
-- none. Never waits: if somebody else writes a line of limit_waits right now, it decides with a snapshot that does not have this end. The node that
-- commits this end looks at that slot next, whatever its line says (thaw); for other queues the next look, two seconds later, finds it.
create or replace function durable.free_slot() returns trigger language plpgsql as $$
declare
    slot text := durable.slot_of(old.rate_limit);
    kept text;
begin
    if tg_op = 'DELETE' or new.status in ('done', 'failed', 'cancelled') then
        delete from durable.kept_slots s where s.instance_id = old.id returning s.key into kept;
    elsif exists (select 1 from durable.kept_slots s where s.instance_id = old.id and s.key = slot) then
        return null;  -- it keeps its slot
    end if;
    perform durable.expect_slot(slot);
    if kept is distinct from slot then perform durable.expect_slot(kept); end if;
    return null;
end $$;

create or replace trigger gen_durable_slot_freed after update on durable.gen_durable
    for each row when (old.rate_limit is not null and strpos(old.rate_limit, '!') > 0 and old.status <> new.status
                       and (old.status = 'executing' or new.status in ('done', 'failed', 'cancelled'))) execute function durable.free_slot();

create or replace trigger gen_durable_slot_gone after delete on durable.gen_durable
    for each row when (old.rate_limit is not null and strpos(old.rate_limit, '!') > 0 and old.status not in ('done', 'failed', 'cancelled')) execute function durable.free_slot();

-- The limits of the step that an instance enters. One that keeps a slot uses it in every step, until it enters a step with another slot: then it
-- gives it up. So an instance has one slot at most, and two of them never wait for each other.
create or replace function durable.with_kept(instance bigint, limits text) returns text language plpgsql volatile as $$
declare
    kept text;
begin
    select s.key into kept from durable.kept_slots s where s.instance_id = instance;
    if kept is null or durable.slot_of(limits) = kept then
        return limits;
    elsif durable.slot_of(limits) is null then
        return concat_ws(chr(31), limits, '!' || kept);
    end if;
    delete from durable.kept_slots s where s.instance_id = instance;
    perform durable.expect_slot(kept);
    return limits;
end $$;

comment on function durable.with_kept is 'durable_actors: the limits of a step, and the slot that its instance keeps';

-- The limits of the steps that compensate: an instance that is cancelled enters such a step with these, not with those of the step that it leaves.
alter table durable.compensations add column if not exists limits text;

-- compensate (0020)
create or replace function durable.compensate(instance bigint, why jsonb, to_step text) returns text language plpgsql volatile as $$
declare
    o    durable.gen_durable;
    told text;
begin
    select * into o from durable.gen_durable g where g.id = instance;
    update durable.gen_durable g
       set status = 'runnable', hold = 0, step = to_step, attempt = 0, crashes = 0, round = 0, visit = least(g.visit, 9223372036854775806) + 1, eligible_at = durable.now(),
           last_error = null, error_type = null, traceback = null, awaits = null, await_step = null, await_deadline = null, children_total = 0,
           children_pending = 0, wake_on_failure = false, locked_by = null, lease_expires_at = null, claim_id = null,
           claim_token_hash = null, request = null, manual = null,
           rate_limit = durable.with_kept(instance, (select c.limits from durable.compensations c
                                                      where c.fsm = o.fsm and c.fsm_version = o.fsm_version and c.step = to_step)),
           cancellation = jsonb_strip_nulls(jsonb_build_object('by', why ->> 'by', 'reason', why ->> 'reason', 'at', coalesce(why -> 'at', to_jsonb(durable.now())))),
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = instance
    returning case when g.journal >= 2 then durable.note(
        g.id, g.rev, 'compensating', o.step, g.step, o.visit, o.attempt, o.round, commander => why ->> 'by',
        further => jsonb_build_object(
            'columns', jsonb_build_object('cancellation', g.cancellation)
                       || case when g.rate_limit is distinct from o.rate_limit then jsonb_build_object('rate_limit', g.rate_limit) else '{}' end,
            'command', jsonb_strip_nulls(jsonb_build_object('type', 'cancel', 'key', why ->> 'key', 'reason', why ->> 'reason'))
                       || jsonb_build_object('metadata', case when jsonb_typeof(why -> 'metadata') = 'object' then why -> 'metadata' else '{}' end)))
        end into told;
    if durable.asked_for_children(why) then
        perform durable.cascade(instance, null, why);
    end if;
    return o.queue;
end $$;

-- end_doomed (0025): and what was dropped, because a limit is full; unless a step compensates for it.
create or replace function durable.end_doomed(instance bigint) returns boolean language plpgsql volatile as $$
declare
    r durable.gen_durable;
    undo text;
begin
    select g.* into r from durable.gen_durable g where g.id = instance;
    if durable.is_dropped(r.cancellation, r.visit) then
        select c.step into undo from durable.compensations c where c.fsm = r.fsm and c.fsm_version = r.fsm_version;
    elsif r.cancellation is null or not r.cancellation ? 'upstream' then
        return false;
    end if;
    if undo is not null then
        perform durable.commit_claim(r, true, 'next', 'runnable', undo, null, null, 0, 1, 0, null, false, null, null, false, null, null, '{}', '{}');
    else
        perform durable.commit_claim(r, true, 'cancelled', 'cancelled', r.step, null, null, r.attempt, 0, 0,
                                     jsonb_build_object('text', r.cancellation ->> 'reason'), false, null, null, false, null, null, '{}', '{}');
    end if;
    return true;
end $$;

-- Change levels: charge what a step says it has spent, give back (a negative weight) what was charged for a step that never began. Locks the keys
-- in their order, so two callers never wait for each other; a pick does not wait at all. Unknown limits, and those without a rate, have no level.
create or replace function durable.charge_limits(space text, keys text[], weights float8[]) returns void language plpgsql volatile as $$
declare
    r record;
begin
    for r in select c.key, sum(c.weight) as weight from unnest(keys, weights) c(key, weight) group by c.key order by c.key collate "C" loop
        perform pg_advisory_xact_lock(hashtextextended(space || chr(1) || r.key, 2));
        insert into durable.limit_keys as s (key, tat, at)
        select r.key, durable.now() + make_interval(secs => greatest(r.weight, 0) * l.interval), durable.now()
          from durable.limits l where l.name = split_part(r.key, ':', 1) and l.interval is not null
            on conflict (key) do update
           set tat = durable.moment(s.at, durable.now()) + make_interval(secs => greatest(durable.spent(s.tat, s.at, durable.now())
                   + r.weight * (select l.interval from durable.limits l where l.name = split_part(r.key, ':', 1)), 0)),
               at = durable.moment(s.at, durable.now()),
               blocked = case when s.blocked > s.at
                              then durable.moment(s.at, durable.now()) + (s.blocked - greatest(s.at, durable.moment(s.at, durable.now()))) end;
        if r.weight < 0 then
            update durable.limit_waits w set next_at = durable.now()
             where (w.key, w.queue) in (select x.key, x.queue from durable.limit_waits x
                                         where x.key = r.key and x.next_at > durable.now() for update skip locked);
        end if;
    end loop;
end $$;

comment on function durable.charge_limits is 'durable_actors: charge or give back tokens';

-- Let nothing begin that uses these keys for so many seconds (`RateLimited`). Locks as charge_limits.
create or replace function durable.block_limits(space text, keys text[], seconds float8) returns void language plpgsql volatile as $$
declare
    k text;
begin
    for k in select distinct c.key collate "C" as key from unnest(keys) c(key) order by 1 loop
        perform pg_advisory_xact_lock(hashtextextended(space || chr(1) || k, 2));
        insert into durable.limit_keys as s (key, tat, at, blocked)
        values (k, durable.now(), durable.now(), durable.now() + make_interval(secs => least(seconds, 1e8)))
            on conflict (key) do update
           set tat = durable.moment(s.at, durable.now()) + make_interval(secs => durable.spent(s.tat, s.at, durable.now())),
               at = durable.moment(s.at, durable.now()),
               blocked = durable.moment(s.at, durable.now()) + make_interval(secs => greatest(least(seconds, 1e8), coalesce(durable.spent(s.blocked, s.at, durable.now()), 0)));
    end loop;
end $$;

comment on function durable.block_limits is 'durable_actors: let nothing that uses a limit begin for a while';

-- Let a key begin anew: all its tokens are there, and nobody is told to wait. Locks as charge_limits. False: it has been at rest.
create or replace function durable.rest_limit(space text, in_key text) returns boolean language plpgsql volatile as $$
begin
    perform pg_advisory_xact_lock(hashtextextended(space || chr(1) || in_key, 2));
    update durable.limit_keys s set tat = durable.now(), at = durable.now(), blocked = null
     where s.key = in_key and (durable.spent(s.tat, s.at, durable.now()) > 0 or durable.spent(s.blocked, s.at, durable.now()) > 0);
    if not found then
        return false;
    end if;
    perform durable.expect_slot(in_key);
    return true;
end $$;

comment on function durable.rest_limit is 'durable_actors: let a key of a limit begin anew';

-- wait_for_work (0021): a queue in which a throttled row may have its token has work, too: its row has no priority.
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
    stopped text[];
    tokens text[];
begin
    loop
        perform pg_sleep(least(pause, greatest(extract(epoch from until - clock_timestamp())::float8, 0)));
        began := clock_timestamp();
        stopped := array(select p.queue from durable.pauses p
                          where p.queue = any (queues) and p.fsm = '' and (p.until is null or p.until > began + ahead));
        tokens := case when exists (select 1 from durable.limit_waits) then array(
                      select distinct w.queue from durable.limit_waits w where w.queue = any (queues) and w.next_at <= began + ahead) end;
        foreach found_queue in array queues loop
            continue when found_queue = any (stopped);
            if found_queue = any (tokens) then
                found_priority := null;
                hit := true;
                return next;
            end if;
            select g.priority, g.eligible_at into found_priority, due from durable.gen_durable g
             where durable.offered(g.status, g.hold) and g.queue = found_queue
             order by g.priority, g.eligible_at, g.id limit 1;
            while found_priority is not null loop
                if due <= began + ahead then
                    hit := true;
                    return next;
                    exit;
                end if;
                select g.priority, g.eligible_at into found_priority, due from durable.gen_durable g
                 where durable.offered(g.status, g.hold) and g.queue = found_queue and g.priority > found_priority
                 order by g.priority, g.eligible_at, g.id limit 1;
            end loop;
        end loop;
        exit when hit or clock_timestamp() >= until;
        pause := greatest(every, 20 * extract(epoch from clock_timestamp() - began)::float8);
    end loop;
end $$;

-- Statements that an engine sends, as functions for runners (0024): they have the text of their files.

create or replace function durable.write_limits(bigint[], uuid[], text[]) returns setof void language sql volatile as $$
update durable.gen_durable g
   set rate_limit = durable.with_kept(g.id, u.limits), rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
  from unnest($1::bigint[], $2::uuid[], $3::text[]) u(id, claim, limits)
 where g.id = u.id and g.claim_id = u.claim and g.xmin = pg_current_xact_id()::xid
returning case when g.journal >= 2 then durable.note(g.id, g.rev, 'limited', g.step, null, g.visit, g.attempt, g.round,
              further => jsonb_build_object('columns', jsonb_build_object('rate_limit', g.rate_limit))) end
$$;
