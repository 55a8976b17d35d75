-- begin_sample: the right to take the sample of this interval, for the first who asks. For the dashboard.
-- params   $1 seconds of an interval float8
-- returns  slot, or no row: somebody else takes it, or has taken it
-- locks    none that others wait for: the primary key decides
-- index    samples_pkey
insert into durable.samples (slot) values (floor(extract(epoch from clock_timestamp()) / $1::float8)::bigint) on conflict do nothing returning slot
