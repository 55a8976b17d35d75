-- Cancelling instances: what several statements share.

-- Whether the node that runs an instance was asked to cancel it: then only its end may be committed, and whoever ends its claim without
-- an outcome ends the instance. One expression, which the planner inlines; a row without a request costs one comparison with null.
create function durable.asked_to_cancel(request jsonb) returns boolean language sql immutable parallel safe as
    $$ select request is not null and coalesce(request ->> 'kind', '') = 'cancel' $$;

comment on function durable.asked_to_cancel is 'durable_actors: whether a request asks the node that runs an instance to cancel it';

-- Count one child that has failed or was cancelled at its parent's barrier, if the parent still waits there: join_parents.sql for a
-- statement that must also work in a savepoint, where xmin tells nothing. Returns the queue of a parent whose barrier this opens.
-- A parent whose partition key no index of runnable rows can hold (only a hand writes one) fails alone.
create function durable.count_ended(parent bigint, at_barrier bigint) returns text language plpgsql volatile as $$
declare
    p    durable.gen_durable;
    told text;
begin
    if parent is null or at_barrier is null then
        return null;
    end if;
    select * into p from durable.gen_durable g
     where g.id = parent and g.visit = at_barrier and g.status = 'awaiting_children' for no key update;
    if not found then
        return null;
    end if;
    if p.children_pending > 1 and not p.wake_on_failure then
        update durable.gen_durable g
           set children_pending = g.children_pending - 1, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
         where g.id = p.id
        returning case when g.journal >= 3 then durable.note(g.id, g.rev, 'child_ended', p.step, null, g.visit, g.attempt, g.round,
                      further => jsonb_build_object('count', 1, 'failed', true, 'pending', g.children_pending)) end into told;
        return null;
    end if;
    if octet_length(p.partition_key) > 2000 then
        update durable.gen_durable g
           set status = 'failed', finished_at = durable.now(), error_type = null, traceback = null,
               last_error = format('its partition key has %s bytes, at most 2000 are allowed', octet_length(p.partition_key)),
               children_pending = greatest(g.children_pending - 1, 0), eligible_at = durable.now(), step = coalesce(g.await_step, g.step),
               await_step = null, await_deadline = null, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
         where g.id = p.id
        returning case when g.journal >= 1 then durable.note(g.id, g.rev, 'unfit', p.step, g.step, g.visit, g.attempt, g.round,
                      failure => jsonb_build_object('text', g.last_error),
                      further => jsonb_build_object('eligible_at', g.eligible_at, 'children_pending', g.children_pending)) end into told;
        return null;
    end if;
    update durable.gen_durable g
       set status = 'runnable', hold = durable.hold_of(g.request), children_pending = greatest(g.children_pending - 1, 0), eligible_at = durable.now(),
           step = coalesce(g.await_step, g.step), await_step = null, await_deadline = null,
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = p.id
    returning case when g.journal >= 3 then durable.note(g.id, g.rev, 'joined', p.step, g.step, g.visit, g.attempt, g.round,
                  further => jsonb_build_object('count', 1, 'failed', true, 'pending', g.children_pending)) end into told;
    if p.cancel_rest then
        perform durable.cascade(p.id, p.visit, null);
    end if;
    return p.queue;
end $$;

comment on function durable.count_ended is 'durable_actors: count an ended child at its parent''s barrier';

-- Record that an instance was cancelled: by a command, which is in its request, or because what compensated has crashed too often.
-- Called in RETURNING, like durable.note.
create function durable.note_cancelled(instance bigint, new_rev bigint, at_step text, at_visit bigint, at_attempt int, at_round int,
                                       request jsonb, reason text)
returns void language plpgsql volatile as $$
begin
    perform durable.note(
        instance, new_rev, 'cancelled', at_step, null, at_visit, at_attempt, at_round,
        commander => case when durable.asked_to_cancel(request) then request ->> 'by' end,
        failure => case when reason is not null then jsonb_build_object('text', reason) end,
        further => case when not durable.asked_to_cancel(request) then '{}'
                        else jsonb_build_object('command', jsonb_strip_nulls(jsonb_build_object(
                                 'type', 'cancel', 'key', request ->> 'key', 'reason', reason)) || jsonb_build_object(
                                 'metadata', case when jsonb_typeof(request -> 'metadata') = 'object' then request -> 'metadata' else '{}' end)) end);
end $$;

comment on function durable.note_cancelled is 'durable_actors: the record of a cancelled instance';
