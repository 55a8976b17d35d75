-- Cancelling children, and steps that compensate.

-- Children that are to be cancelled: durable work, written by the transaction that decided it and done in small batches in the order of ids.
create table durable.cascades (
    id          bigint generated always as identity primary key,
    parent_id   bigint not null,
    barrier     bigint,                                       -- the children of this barrier only; null: all
    request     jsonb not null                                -- who, why and when, as in gen_durable.request
);

comment on table durable.cascades is 'durable_actors: whose children are to be cancelled';
