-- examine_tables: rows, dead rows, sizes and last vacuum of the tables of the schema, as the statistics have them. For `doctor`.
-- params   $1 schema text
-- returns  table, live rows, dead rows, bytes with indexes, seconds since the last vacuum or null
-- locks    none
select s.relname, s.n_live_tup, s.n_dead_tup, pg_total_relation_size(s.relid),
       extract(epoch from clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8
  from pg_stat_user_tables s where s.schemaname = $1::text order by s.relname
