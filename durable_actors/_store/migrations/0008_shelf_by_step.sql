-- transaction: none
-- Rows that a node met and whose machine, version or step it does not know; a node that does finds them here.
-- Built beside the old index, then renamed: whoever looks at the shelf meanwhile has one of the two.

drop index concurrently if exists durable.gen_durable_shelf_new;
create index concurrently gen_durable_shelf_new on durable.gen_durable
    (queue, fsm, fsm_version, step, priority, eligible_at, id) where status = 'runnable' and hold = 2;
drop index concurrently if exists durable.gen_durable_shelf;
alter index durable.gen_durable_shelf_new rename to gen_durable_shelf;
