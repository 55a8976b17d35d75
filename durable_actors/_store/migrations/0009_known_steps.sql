-- What the pick needs to know about partition keys, when a node may know a machine and not all of its steps.

-- judge_keys (0002, which says how it works and why it is safe) with another list of what the caller can run: `known` has
-- "fsm version step", separated by chr(31), which no name of a machine or step contains. An elder sibling at a step that the
-- caller's code does not have gives up its place, like one of an unknown machine. `gone` are keys of rows that this pick shelves.
-- judge_keys itself stays: nodes of an older release call it while they run beside this one.
create function durable.judge_siblings(
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
                 where y.partition_key = r.k and y.status = 'runnable' and y.eligible_at <= now()
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
        update durable.gen_durable g set hold = 0, updated_at = now() where g.id = any (array(
            select h.id from unnest(heal) u(k)
             cross join lateral (
                 select y.id from durable.gen_durable y
                  where y.partition_key = u.k and y.status = 'runnable' and y.hold = 1
                  order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h));
    end if;
end $$;
