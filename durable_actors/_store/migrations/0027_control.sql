-- Who is paused, and which machines are paused, for whoever lists or waits.

-- Whether a command has paused an instance that has not ended; also one that a hand has held like that.
-- One expression, which the planner inlines.
create function durable.is_paused(status durable.durable_status, hold smallint, request jsonb) returns boolean language sql immutable parallel safe as $$
    select case when status = 'runnable' then hold = 4 or durable.asked_to_pause(request)
                when status in ('executing', 'awaiting_signal', 'awaiting_children') then durable.asked_to_pause(request) else false end $$;

comment on function durable.is_paused is 'durable_actors: whether an instance is paused';

-- Which machines are paused in these queues. Volatile, so that it looks when it is called and not when its statement began: the long poll
-- asks it at its end.
create function durable.paused_machines(queues text[]) returns table (queue text, fsm text) language plpgsql volatile as $$
begin
    return query select p.queue, p.fsm from durable.pauses p where p.queue = any (queues) and p.fsm <> '' and durable.lasts(p.until);
end $$;

comment on function durable.paused_machines is 'durable_actors: the machines that are paused in queues';
