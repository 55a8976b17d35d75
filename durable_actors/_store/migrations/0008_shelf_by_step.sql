-- transaction: none
-- Rows that a node met and whose machine, version or step it does not know; a node that does finds them here.
-- Not by `step` itself: an update that changes an indexed column is not HOT, and every transition changes the step (a step of
-- five cost the server a third more). So whoever shelves a row notes its step. Rows that were shelved before, or by hand,
-- have none, and are looked at by every node that knows their machine.
-- Built beside the old index, then renamed: whoever looks at the shelf meanwhile has one of the two.

alter table durable.gen_durable add column if not exists shelved_step text;
drop index concurrently if exists durable.gen_durable_shelf_new;
create index concurrently gen_durable_shelf_new on durable.gen_durable
    (queue, fsm, fsm_version, coalesce(shelved_step, ''), priority, eligible_at, id) where status = 'runnable' and hold = 2;
drop index concurrently if exists durable.gen_durable_shelf;
alter index durable.gen_durable_shelf_new rename to gen_durable_shelf;
