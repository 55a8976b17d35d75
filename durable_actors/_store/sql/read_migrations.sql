-- read_migrations: the versions that this database has.
-- params   none
-- returns  version int, the oldest schema version whose code works with the database after it, ascending. As JSON: before
--          migration 0015 the table has no such column
-- locks    none
select m.version, coalesce((to_jsonb(m) ->> 'works_with')::int, 0) from durable.migrations m order by m.version
