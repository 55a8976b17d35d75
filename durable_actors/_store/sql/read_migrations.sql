-- read_migrations: the versions that this database has.
-- params   none
-- returns  version int, ascending
-- locks    none
select version from durable.migrations order by version
