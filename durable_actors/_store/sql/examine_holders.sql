-- examine_holders: who keeps vacuum from removing dead rows: old transactions, prepared ones, replication slots. For `doctor`.
-- params   $1 how old in seconds float8
-- returns  what (transaction, prepared, slot), its name or pid, seconds or null, transactions since, a description. What this role may not see is missing
-- locks    none
select 'transaction', a.pid::text, extract(epoch from clock_timestamp() - a.xact_start)::float8, greatest(age(a.backend_xmin), age(a.backend_xid)),
       concat_ws(', ', a.usename, nullif(a.application_name, ''), a.state, host(a.client_addr))
  from pg_stat_activity a
 where coalesce(a.backend_xmin, a.backend_xid) is not null and a.pid <> pg_backend_pid() and a.backend_type = 'client backend'
   and a.xact_start < clock_timestamp() - make_interval(secs => $1::float8)
union all
select 'prepared', p.gid, extract(epoch from clock_timestamp() - p.prepared)::float8, age(p.transaction), p.owner::text
  from pg_prepared_xacts p where p.prepared < clock_timestamp() - make_interval(secs => $1::float8)
union all
select 'slot', r.slot_name::text, null, greatest(age(r.xmin), age(r.catalog_xmin)),
       case when r.active then 'active' else 'inactive' end
  from pg_replication_slots r where greatest(age(r.xmin), age(r.catalog_xmin)) > 1000000
