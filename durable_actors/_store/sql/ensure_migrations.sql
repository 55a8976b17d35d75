-- ensure_migrations: the record of what was applied; made before the first migration.
-- params   none
-- returns  nothing
-- locks    the caller holds the migrators' advisory lock
create table if not exists durable.migrations (
    version    int primary key,
    name       text not null,
    applied_at timestamptz not null default now()
)
