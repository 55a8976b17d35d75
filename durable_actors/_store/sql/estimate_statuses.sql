-- estimate_statuses: about how many instances have each status: what the last ANALYZE saw; failed ones counted up to a cap. For the dashboard.
-- params   $1 schema text · $2 cap int
-- returns  what it is: 'estimate', 'failed' or 'bytes' · status or null · number: of instances, or the size of the table
-- locks    none
-- index    gen_durable_failed; the statistics of the planner: no other row of the table is read
select 'estimate', v.status, round(greatest(c.reltuples, 0) * v.share)::bigint
  from pg_catalog.pg_stats s
  join pg_catalog.pg_class c on c.oid = to_regclass(quote_ident($1::text) || '.gen_durable')
 cross join lateral unnest(s.most_common_vals::text::text[], s.most_common_freqs) v(status, share)
 where s.schemaname = $1::text and s.tablename = 'gen_durable' and s.attname = 'status'
union all
select 'failed', null, (select count(*) from (select 1 from durable.gen_durable g where g.status = 'failed' limit $2::int) w)
union all
select 'bytes', null, pg_relation_size(to_regclass(quote_ident($1::text) || '.gen_durable'))
