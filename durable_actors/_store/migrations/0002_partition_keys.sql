-- What the pick needs to know about partition keys, decided under a lock and on a fresh snapshot.

-- Held siblings of a key, in the order in which they go.
create index gen_durable_held on durable.gen_durable (partition_key, priority, eligible_at, id)
    where status = 'runnable' and hold = 1;

-- What a pick may do with the keyed rows of its window, given as arrays sorted by (key, priority, eligible_at, id):
-- which to claim, which to hold behind a sibling, which to leave for a later look. The first row of each key decides:
--   claim   nothing of the key is executing and no earlier due sibling exists; the window's other rows of it are held
--   hold    a sibling is executing, or an earlier due one waits elsewhere, and we have its row lock: all of the window's
--           rows of the key are held behind it
--   leave   another pick is deciding about the key; or that sibling is just being claimed, committed or signalled
-- `gone` are keys of rows that this pick shelves, its node not knowing their machine: they give up their place.
--
-- Why it is safe (docs/explanation/races.md):
--   * a key enters 'executing' only in a pick that holds the key's lock, decided by a snapshot taken after the lock
--     was got. Every earlier claim of the key committed before it gave the lock back, so that snapshot sees it.
--   * a row is held only behind a row whose lock we have: the executing sibling, the one we claim, or an earlier one,
--     which must execute first. Its outcome commits after us, and the promotion that follows it has a newer snapshot:
--     no wake-up is lost. (Left instead, thousands of rows whose elders wait in a full queue would fill every window.)
-- Volatile, so each statement in it has its own snapshot. Set-based: one call per pick, 9 to 19 µs per key; a call
-- per key cost 47. Nothing here waits: try-locks and SKIP LOCKED only.
-- The lock space (hash seed 1) is not the keeper's (seed 0), whose session locks live as long as the step runs.
create function durable.judge_keys(
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
                                    and y.eligible_at <= now()
                                    and (y.priority, y.eligible_at, y.id) < (u.p, u.e, u.i)
                                    and y.fsm || '/' || y.fsm_version = any (known)) then 'earlier'
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
                 where y.partition_key = r.k and y.status = 'runnable' and y.eligible_at <= now()
                   and (y.priority, y.eligible_at, y.id) < (r.p, r.e, r.i)
                   and y.fsm || '/' || y.fsm_version = any (known)
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
        update durable.gen_durable g set hold = 0, updated_at = now() where g.id = any (array(
            select h.id from unnest(heal) u(k)
             cross join lateral (
                 select y.id from durable.gen_durable y
                  where y.partition_key = u.k and y.status = 'runnable' and y.hold = 1
                  order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h));
    end if;
end $$;
