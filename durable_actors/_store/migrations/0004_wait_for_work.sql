-- Looking for work without a client that wakes up for each look.

-- Wait until the queue has a row on offer, due or not; false when there was none for so many seconds. The server looks every
-- `every` seconds: each statement of a volatile function has a snapshot of its own. A poll by the client costs it 0.6 ms of
-- CPU when it has slept for 20 ms (an event loop with cold caches) and the server 0.2; here a look costs the server 0.1.
-- The caller's own snapshot is as old as the wait, and vacuum waits for it: ask for a second or so.
-- By index whatever the statistics say: a sequential scan fifty times a second would be worse than none.
create function durable.wait_for_work(q text, every float8, patience float8) returns boolean
language plpgsql volatile set enable_seqscan = off as $$
declare
    until timestamptz := clock_timestamp() + make_interval(secs => patience);
begin
    loop
        if exists (select 1 from durable.gen_durable g
                    where g.status = 'runnable' and g.hold = 0 and g.queue = q) then
            return true;
        elsif clock_timestamp() >= until then
            return false;
        end if;
        perform pg_sleep(every);
    end loop;
end $$;
