-- Commits that delete: what is left of a group whose rows are gone.

-- One row per group of outcomes that deleted rows (`keep=0`), written by its transaction: the row is there if and only if the group was
-- committed. A commit of unknown fate is read back from the instance's row; where that row is gone, from here. The flusher deletes
-- its rows again with the next group, so there is one for each flusher that is at work; the janitor deletes those of the dead.
create table durable.flushes (
    token uuid primary key,                                   -- made by the node, before it sends the group
    at    timestamptz not null default durable.now(),
    kept  bigint[]                                            -- instances of the group that it did not delete: stale, or somebody may look for them
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

comment on table durable.flushes is 'durable_actors: group commits that deleted instances, until their nodes know that they were committed';
