-- examine_server: version, clock, settings and connections of the server. For `doctor`.
-- params   none
-- returns  version number, seconds since the epoch, whether it is a standby, settings as a JSON object (null: unknown here), connections
--          in use, whether this role sees what other roles do
-- locks    none
select current_setting('server_version_num')::int, extract(epoch from clock_timestamp())::float8, pg_is_in_recovery(),
       (select jsonb_object_agg(s.name, current_setting(s.name, true))
          from unnest(array['autovacuum', 'track_counts', 'fsync', 'synchronous_commit', 'max_connections',
                            'idle_in_transaction_session_timeout', 'default_transaction_isolation']) s(name)),
       (select count(*) from pg_stat_activity a where a.backend_type = 'client backend'),
       pg_has_role(current_user, 'pg_read_all_stats', 'usage')
