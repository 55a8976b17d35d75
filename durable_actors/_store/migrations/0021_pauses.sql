-- Paused queues.

-- No row: nothing is paused. Few rows, which every pick of a queue looks up by the primary key, in its own snapshot: so no pick that begins
-- after the pause was committed claims anything. A row whose time has passed says nothing; the next pause of the same name replaces it.
create table durable.pauses (
    queue       text not null,
    fsm         text not null default '',                     -- of this machine only; '': the whole queue
    until       timestamptz,                                  -- null: until somebody resumes it
    at          timestamptz not null default durable.now(),   -- since when
    by          text,
    reason      text,
    primary key (queue, fsm)
);

comment on table durable.pauses is 'durable_actors: queues from which nothing is picked';

-- Whether a pause has not ended by itself. One expression, which the planner inlines.
create function durable.lasts(until timestamptz) returns boolean language sql stable parallel safe as
    $$ select until is null or until > durable.now() $$;

comment on function durable.lasts is 'durable_actors: whether a pause of a queue has not ended by itself';

-- judge_siblings (0016; 0002 says how it works and why it is safe): rows of a paused queue or machine give up their place.
create or replace function durable.judge_siblings(
    space text, known text[], gone text[], ks text[], ps smallint[], es timestamptz[], ids bigint[],
    out claim bigint[], out hold bigint[], out leave bigint[]
) language plpgsql volatile as $$
declare
    got boolean[];
    heal text[] := gone;
    verdict text;
    elder smallint;
    healed bigint;
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
                                    and y.fsm || chr(31) || y.fsm_version || chr(31) || y.step = any (known)
                                    and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                                    and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until)))
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
                   and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                   and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
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
        with healed as (
            update durable.gen_durable g
               set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
             where g.id = any (array(
                select h.id from unnest(heal) u(k)
                 cross join lateral (
                     select y.id from durable.gen_durable y
                      where y.partition_key = u.k and y.status = 'runnable' and y.hold = 1
                        and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                        and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                      order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h))
            returning case when g.journal >= 3 then durable.note(g.id, g.rev, 'offered', g.step, null, g.visit, g.attempt, g.round) end
        )
        select count(*) into healed from healed;
    end if;
end $$;

-- wait_for_work (0017): it sees nothing in a paused queue. Rows of a paused machine are seen until a pick has set them aside.
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
begin
    loop
        perform pg_sleep(least(pause, greatest(extract(epoch from until - clock_timestamp())::float8, 0)));
        began := clock_timestamp();
        stopped := array(select p.queue from durable.pauses p
                          where p.queue = any (queues) and p.fsm = '' and (p.until is null or p.until > began + ahead));
        foreach found_queue in array queues loop
            continue when found_queue = any (stopped);
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
