-- record_migration: note that a migration was applied, in its own transaction where there is one.
-- params   $1 version int · $2 name text · $3 the oldest schema version whose code works with the database after it int
-- returns  nothing
-- locks    the caller holds the migrators' advisory lock; the primary key referees those who do not
-- keeps    one statement for every migration: the table has no works_with before 0015, and what it has no column for is dropped
insert into durable.migrations
select r.* from jsonb_populate_record(null::durable.migrations, jsonb_build_object(
    'version', $1::int, 'name', $2::text, 'applied_at', pg_catalog.now(), 'works_with', $3::int)) r
