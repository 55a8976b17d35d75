-- Instances by their tags. Rows without tags, and their updates, do not touch it.
-- transaction: none
-- Dropped first: a build that was interrupted leaves an index that no query uses and `if not exists` would keep.

drop index concurrently if exists durable.gen_durable_tags;
create index concurrently gen_durable_tags on durable.gen_durable using gin (tags) where tags is not null;
