-- transaction: none
-- What the dashboard reads instead of the hot table: samples of queues and nodes, one per interval for the whole cluster; and an index of
-- failed rows, which lists, counts and groups them. Rows that do not fail are never in it: their commits pay one comparison.
-- Dropped first: a build that was interrupted leaves an index that no query uses and `if not exists` would keep.

create table if not exists durable.samples (
    slot bigint primary key,                                  -- the interval: who inserts its row takes the sample
    at   timestamptz not null default pg_catalog.now(),
    data jsonb                                                -- null: being taken, or its taker died
);

comment on table durable.samples is 'durable_actors: how much work there was, for the dashboard; see docs/internals/dashboard.md';

drop index concurrently if exists durable.gen_durable_failed;
create index concurrently gen_durable_failed on durable.gen_durable (id) where status = 'failed';
