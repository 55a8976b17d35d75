-- Which rows the pick may take: one definition, for the pick, the long poll, the statistics of queues and explain.
-- SQL functions of one expression, which the planner inlines: indexes, plans and costs are those of the expressions themselves.
-- The third one is durable.keeps_place (0010).

create function durable.offered(status durable.durable_status, hold smallint) returns boolean language sql immutable parallel safe as
    $$ select status = 'runnable' and hold = 0 $$;

comment on function durable.offered is 'durable_actors: whether the pick may take a row, once it is due';

create function durable.due(eligible_at timestamptz) returns boolean language sql stable parallel safe as
    $$ select eligible_at <= durable.now() $$;

comment on function durable.due is 'durable_actors: whether a row may run now';

-- wait_for_work (0010), by that definition. It compares `eligible_at` with the present instead of calling durable.due: now() is the
-- beginning of its transaction, and it waits.
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
