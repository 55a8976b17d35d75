-- ensure_migrations: create the table that records applied migrations, before the first one.
-- params   none
-- returns  nothing
-- locks    the caller holds the migrators' advisory lock
create table if not exists durable.migrations (
    version    int primary key,
    name       text not null,
    applied_at timestamptz not null default pg_catalog.now()
)
