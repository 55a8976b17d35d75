-- Which releases work with a database: a package that knows fewer migrations than a database has may start all the same, if it
-- knows those up to the highest `works_with`. The rows that are there already say nothing: 0.

alter table durable.migrations add column works_with int not null default 0;

comment on column durable.migrations.works_with is
    'durable_actors: the oldest schema version whose code works with the database after this migration';
