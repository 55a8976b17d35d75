-- Cancelling children, and steps that compensate.

-- Why the instance was cancelled, while it compensates (`on_cancel`) and afterwards: {"by", "reason", "at"}. A column of its own, because a
-- request is over when the claim is that it was made of. And what a barrier does with the children that still live when it opens:
-- true: cancel them (`rest="cancel"`); only park_parent writes it. Both are null in all other rows, and cost them nothing.
alter table durable.gen_durable add column cancellation jsonb, add column cancel_rest boolean;

comment on column durable.gen_durable.cancellation is 'durable_actors: why it was cancelled, of an instance that compensates or has compensated';
comment on column durable.gen_durable.cancel_rest is 'durable_actors: whether the children that live when its barrier opens are cancelled';

-- Which step a machine enters when it is cancelled (`@step(on_cancel=True)`), written by the engines that know the machine: whoever cancels
-- need not know it. Few rows.
create table durable.compensations (
    fsm         text not null,
    fsm_version int not null,
    step        text not null,
    primary key (fsm, fsm_version)
);

comment on table durable.compensations is 'durable_actors: the step that a cancelled instance of a machine enters';

-- Children that are to be cancelled: durable work, written by the statement that decided it and done by cancel_children in small batches.
-- Usually empty.
create table durable.cascades (
    id          bigint generated always as identity primary key,
    parent_id   bigint not null,
    barrier     bigint,                                       -- the children of this barrier only; null: all
    up_to       bigint not null,                              -- the last id that was given then: later children are not meant
    after       bigint not null default 0,                    -- the last child that was looked at
    missed      bigint,                                       -- the first child that was locked by somebody else
    next_at     timestamptz not null default '-infinity',     -- when it is looked at next: those that waited for longest go first
    request     jsonb not null check (jsonb_typeof(request) = 'object')  -- what the children are asked: as in gen_durable.request
);

create index cascades_next on durable.cascades (next_at, id);
create index cascades_parent on durable.cascades (parent_id);

comment on table durable.cascades is 'durable_actors: whose children are to be cancelled';

-- Decide that children are cancelled: those that have an id by now. Called by the statement that ends the parent, moves it to its
-- compensation, or opens its barrier, under the lock of the parent's row: whoever inserts a child of it has committed before, or is refused.
create function durable.cascade(parent bigint, at_barrier bigint, why jsonb) returns boolean language sql volatile as $$
    insert into durable.cascades (parent_id, barrier, up_to, request)
    values (parent, at_barrier, coalesce(pg_sequence_last_value('durable.gen_durable_id_seq'::regclass), 0),
            jsonb_strip_nulls(jsonb_build_object(
                'kind', 'cancel', 'by', why ->> 'by', 'at', coalesce(why -> 'at', to_jsonb(durable.now())), 'children', 'cancel', 'parent', parent,
                'reason', coalesce(why ->> 'reason', format('its parent, instance %s, %s', parent,
                                                            case when at_barrier is null then 'was cancelled' else 'goes on without it' end)))))
    returning true
$$;

comment on function durable.cascade is 'durable_actors: let the children of an instance be cancelled';

-- Whether whoever ends an instance as cancelled cancels its children, too.
create function durable.asked_for_children(request jsonb) returns boolean language sql immutable parallel safe as
    $$ select coalesce(request ->> 'children', '') = 'cancel' $$;

comment on function durable.asked_for_children is 'durable_actors: whether a request to cancel an instance is for its children, too';

-- The step that an instance enters instead of being cancelled, as its request names it; null: it ends. A partition key that no index of
-- runnable rows can hold (only a hand writes one) would refuse that: such a row ends.
create function durable.compensation(request jsonb, partition_key text) returns text language sql immutable parallel safe as
    $$ select case when request is not null and octet_length(coalesce(partition_key, '')) <= 2000 then request ->> 'on_cancel' end $$;

comment on function durable.compensation is 'durable_actors: the step that an instance enters when it is cancelled';

-- Let a cancelled instance enter the step that compensates, whatever it did before. The caller has locked its row. Returns its queue.
create function durable.compensate(instance bigint, why jsonb, to_step text) returns text language plpgsql volatile as $$
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
           cancellation = jsonb_strip_nulls(jsonb_build_object('by', why ->> 'by', 'reason', why ->> 'reason', 'at', coalesce(why -> 'at', to_jsonb(durable.now())))),
           rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
     where g.id = instance
    returning case when g.journal >= 2 then durable.note(
        g.id, g.rev, 'compensating', o.step, g.step, o.visit, o.attempt, o.round, commander => why ->> 'by',
        further => jsonb_build_object(
            'columns', jsonb_build_object('cancellation', g.cancellation),
            'command', jsonb_strip_nulls(jsonb_build_object('type', 'cancel', 'key', why ->> 'key', 'reason', why ->> 'reason'))
                       || jsonb_build_object('metadata', case when jsonb_typeof(why -> 'metadata') = 'object' then why -> 'metadata' else '{}' end)))
        end into told;
    if durable.asked_for_children(why) then
        perform durable.cascade(instance, null, why);
    end if;
    return o.queue;
end $$;

comment on function durable.compensate is 'durable_actors: let a cancelled instance enter the step that compensates';

-- Whether children are to be cancelled now. Volatile, so that it looks when it is called and not when its statement began: the long poll asks
-- it at its end.
create function durable.has_cascades() returns boolean language plpgsql volatile as $$
begin
    return exists (select 1 from durable.cascades c where c.next_at <= clock_timestamp());
end $$;

comment on function durable.has_cascades is 'durable_actors: whether children are to be cancelled now';
