-- Manual boundaries: an instance that waits for a person, and what the person decided.
alter table durable.gen_durable add column manual jsonb;

comment on column durable.gen_durable.manual is 'durable_actors: the boundary where it waits for a person, or the decision that its step gets';
