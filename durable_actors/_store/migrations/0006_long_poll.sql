-- Looking for due work of several queues, without a client that wakes up for each look.

drop function durable.wait_for_work(text, float8, float8);

-- Look every `every` seconds, for the first time after so long; return the queues that have a due row, each with the most
-- urgent of its priorities that has one; nothing when there was none for `patience` seconds.
-- Each statement of a volatile function has a snapshot of its own. The caller's snapshot is as old as the wait, and vacuum
-- waits for it: ask for a second at the most.
-- One index probe per queue and priority on offer: the first row of a priority is its soonest, so future rows are never read
-- through. By index whatever the statistics say, and without a sort. Dead index entries can make a look expensive: then looks
-- are less frequent, and cost a twentieth of the time.
create function durable.wait_for_work(queues text[], every float8, patience float8)
returns table (found_queue text, found_priority smallint)
language plpgsql volatile
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
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
                if due <= began then
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
