-- transaction: none
-- Requests of commands to the nodes that run their targets, and paused rows: indexes of nothing while there are none.
-- Dropped first: a build that was interrupted leaves an index that no query uses and `if not exists` would keep.

drop index concurrently if exists durable.gen_durable_requests;
create index concurrently gen_durable_requests on durable.gen_durable (locked_by) where request is not null;

drop index concurrently if exists durable.gen_durable_paused;
create index concurrently gen_durable_paused on durable.gen_durable (queue, id) where status = 'runnable' and hold = 4;
