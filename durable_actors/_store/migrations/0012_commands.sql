-- What commands need: the status `cancelled`, requests to the node that runs an instance, receipts, further reasons to hold a row.
-- Constraints are replaced NOT VALID, which reads no row; 0013 validates them under a lock that lets everybody write.

alter table durable.gen_durable
    add column request jsonb,  -- the standing order of a command: to cancel it (asked of the node that runs it), to pause it; null: none
    drop constraint gen_durable_finished,
    add constraint gen_durable_finished check ((status in ('done', 'failed', 'cancelled')) = (finished_at is not null)) not valid,
    drop constraint gen_durable_counts,
    add constraint gen_durable_counts check (visit > 0 and attempt >= 0 and crashes >= 0 and children_pending >= 0
                                                  and hold between 0 and 5) not valid;

-- One row per command that was carried out: who, when, why. Written in the transaction of its effect.
create table durable.receipts (
    id              bigint generated always as identity primary key,
    at              timestamptz not null default durable.now(),
    command         text not null,                            -- retry, cancel, …
    scope           text not null,                            -- what `target` names: instance, queue, …
    target          text not null,                            -- an instance's id, a queue's name, …
    by              text,                                     -- who
    reason          text,                                     -- why
    idempotency_key text,                                     -- the same command with the same key is carried out once
    data            jsonb not null default '{}',              -- further arguments, without secrets
    result          jsonb                                     -- what the caller was told
);

comment on table durable.receipts is 'durable_actors: commands that were carried out';

create unique index receipts_once on durable.receipts (command, scope, target, idempotency_key) where idempotency_key is not null;

-- The receipts of one target, in order.
create index receipts_target on durable.receipts (scope, target, id);

-- Whether a command has paused the instance: whenever it becomes runnable, it is held with reason 4. Two SQL functions of one expression,
-- which the planner inlines; a row without a request costs one comparison with null.
create function durable.asked_to_pause(request jsonb) returns boolean language sql immutable parallel safe as
    $$ select request is not null and coalesce(request ->> 'kind', '') = 'pause' $$;

comment on function durable.asked_to_pause is 'durable_actors: whether a command has paused an instance';

create function durable.hold_of(request jsonb) returns smallint language sql immutable parallel safe as
    $$ select case when request is not null and coalesce(request ->> 'kind', '') = 'pause' then 4::smallint else 0::smallint end $$;

comment on function durable.hold_of is 'durable_actors: the hold of a row that becomes runnable';
