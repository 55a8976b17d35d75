-- Instances that were started from another one.
alter table durable.gen_durable add column rerun_of bigint;

comment on column durable.gen_durable.rerun_of is 'durable_actors: the instance from which the command rerun started it';
