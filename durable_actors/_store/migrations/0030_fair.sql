-- transaction: none
-- Fairness: rows of a queue that share its picks by key (`fair_key`, `Queue(fair=True)`).
-- A row that has a key is in gen_durable_pick like every other, and in an index of its own: so queues that are not fair, the long poll, the
-- statistics of queues and nodes of the release before find it where they look. A row without one costs nothing more.

-- Names are compared byte by byte: the order of the keys means nothing to people, and need not follow a language.
-- The check: what no index entry can hold is refused at once, not when a held row is offered.
alter table durable.gen_durable add column if not exists fair_key text collate "C",
    drop constraint if exists gen_durable_fair_key_fits,
    add constraint gen_durable_fair_key_fits
        check (fair_key is null or (fair_key <> '' and octet_length(queue) + octet_length(fair_key) <= 2600)) not valid;

comment on column durable.gen_durable.fair_key is 'durable_actors: whose row it is; in a fair queue the keys share the picks';

-- Dropped first: a build that was interrupted leaves an index that no query uses.
drop index concurrently if exists durable.gen_durable_fair;
create index concurrently gen_durable_fair on durable.gen_durable (queue, priority, fair_key, eligible_at, id)
    where status = 'runnable' and hold = 0 and fair_key is not null;

-- The fair keys that have a due row, most urgent priority first, in the order of the keys from `cursors` on (one for each priority, '': from
-- the first key): one index probe per key, whatever the backlog of a key, and at most `visits` in all. At the end of each priority a row with
-- the key at which to go on, '' after the last key, and null for "due". A key whose rows are all in the future costs its probe.
create or replace function durable.fair_keys(of_queue text, priorities smallint[], cursors text[], most int, visits int)
returns table (at_priority smallint, at_key text, is_due boolean)
language plpgsql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
    found_due int := 0;
    visited   int := 0;
    at_last   text;
begin
    for i in 1 .. cardinality(priorities) loop
        at_priority := priorities[i];
        at_last := cursors[i];
        loop
            exit when found_due >= most or visited >= visits;
            select g.fair_key, durable.due(g.eligible_at) into at_key, is_due from durable.gen_durable g
             where durable.offered(g.status, g.hold) and g.queue = of_queue and g.priority = at_priority
               and g.fair_key is not null and g.fair_key > at_last
             order by g.fair_key, g.eligible_at, g.id limit 1;
            if not found then
                at_last := '';
                exit;
            end if;
            visited := visited + 1;
            at_last := at_key;
            if is_due then
                found_due := found_due + 1;
                return next;
            end if;
        end loop;
        at_key := at_last;
        is_due := null;
        return next;
        exit when found_due >= most or visited >= visits;
    end loop;
end $$;

comment on function durable.fair_keys is 'durable_actors: the fair keys of a queue that have a due row';

-- The window of a fair pick, locked: of each entry (a priority and a key, '' for rows without one, which `plain` names) its first rows, as
-- many as `quotas` says; what is left of `most` then from the entries that had more, in their order, before any entry of a less urgent
-- priority. Entries of one priority follow each other. `skip`: rows that were left a moment ago, to be looked at later.
-- Each of its statements has a fresh snapshot; what it has locked, the pick updates.
-- The rows of a key are a range, in the order of the key: with "fair_key = …" the planner may read gen_durable_pick in the order of the queue
-- instead, through the whole backlog of other keys (0.8 s beside a million rows).
create or replace function durable.fair_window(of_queue text, most int, priorities smallint[], keys text[], quotas int[], plain bigint[], skip bigint[])
returns table (id bigint, priority smallint, eligible_at timestamptz, k text, at_step text, place int, limited boolean)
language plpgsql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
    ats    timestamptz[] := array_fill('-infinity'::timestamptz, array[cardinality(keys)]);
    ids    bigint[] := array_fill((-9223372036854775808)::bigint, array[cardinality(keys)]);
    more   boolean[] := array_fill(true, array[cardinality(keys)]);
    first  int := 1;
    last   int;
    wanted int;
    got    int;
begin
    place := 0;
    while first <= cardinality(keys) and place < most loop
        last := first;
        while last < cardinality(keys) and priorities[last + 1] = priorities[first] loop
            last := last + 1;
        end loop;
        for pass in 1 .. 2 loop
            for i in first .. last loop
                wanted := case when pass = 1 then least(quotas[i], most - place) else most - place end;
                continue when wanted <= 0 or not more[i];
                got := 0;
                if keys[i] = '' then
                    for id, priority, eligible_at, k, at_step, limited in
                        select g.id, g.priority, g.eligible_at, g.partition_key, g.fsm || chr(31) || g.fsm_version || chr(31) || g.step,
                               g.rate_limit is not null
                          from durable.gen_durable g
                         where g.id = any (plain) and durable.offered(g.status, g.hold) and g.queue = of_queue and g.priority = priorities[i]
                           and g.fair_key is null and durable.due(g.eligible_at) and (g.eligible_at, g.id) > (ats[i], ids[i])
                         order by g.eligible_at, g.id limit wanted for no key update skip locked
                    loop
                        got := got + 1;
                        place := place + 1;
                        return next;
                    end loop;
                else
                    for id, priority, eligible_at, k, at_step, limited in
                        select g.id, g.priority, g.eligible_at, g.partition_key, g.fsm || chr(31) || g.fsm_version || chr(31) || g.step,
                               g.rate_limit is not null
                          from durable.gen_durable g
                         where durable.offered(g.status, g.hold) and g.queue = of_queue and g.priority = priorities[i] and g.fair_key is not null
                           and (g.fair_key, g.eligible_at, g.id) > (keys[i], ats[i], ids[i])
                           and (g.fair_key, g.eligible_at) <= (keys[i], durable.now()) and g.id <> all (skip)
                         order by g.fair_key, g.eligible_at, g.id limit wanted for no key update skip locked
                    loop
                        got := got + 1;
                        place := place + 1;
                        return next;
                    end loop;
                end if;
                more[i] := got = wanted;
                if got > 0 then
                    ats[i] := eligible_at;
                    ids[i] := id;
                end if;
            end loop;
        end loop;
        first := last + 1;
    end loop;
end $$;

comment on function durable.fair_window is 'durable_actors: the rows that a fair pick takes';
