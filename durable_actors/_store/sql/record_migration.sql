-- record_migration: note that a migration was applied, in its own transaction where there is one.
-- params   $1 version int · $2 name text
-- returns  nothing
-- locks    the caller holds the migrators' advisory lock; the primary key referees those who do not
insert into durable.migrations (version, name) values ($1::int, $2::text)
