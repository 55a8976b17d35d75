-- read_rates: how many instances were ever inserted, updated, and signals sent, as Postgres counts them. For rates.
-- params   $1 schema text
-- returns  inserts, updates, signals, seconds since the epoch; of committed and aborted transactions, some 1 s late
-- locks    none
-- index    none: the statistics of two tables
select coalesce(sum(s.n_tup_ins) filter (where s.relname = 'gen_durable'), 0)::bigint,
       coalesce(sum(s.n_tup_upd) filter (where s.relname = 'gen_durable'), 0)::bigint,
       coalesce(sum(s.n_tup_ins) filter (where s.relname = 'signals'), 0)::bigint,
       extract(epoch from clock_timestamp())::float8
  from pg_stat_user_tables s
 where s.schemaname = $1::text and s.relname in ('gen_durable', 'signals')
