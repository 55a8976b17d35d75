-- finish_sample: write the sample of an interval, and thin out old ones: after an hour one of twelve is kept, after a day none. For the dashboard.
-- params   $1 slot bigint · $2 sample jsonb
-- returns  nothing
-- locks    its row, and the old ones
-- index    samples_pkey; the deletion reads the whole table, which has about two thousand rows
with old as (
    delete from durable.samples s
     where s.slot <> $1::bigint and (s.at < pg_catalog.now() - interval '1 day' or (s.at < pg_catalog.now() - interval '1 hour' and s.slot % 12 <> 0))
)
update durable.samples s set data = $2::jsonb, at = pg_catalog.now() where s.slot = $1::bigint
