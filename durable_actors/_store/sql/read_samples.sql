-- read_samples: samples, newest first. For the dashboard.
-- params   $1 above this slot bigint · $2 limit int
-- returns  slot, at, sample
-- locks    none
-- index    samples_pkey, backwards
select s.slot, s.at, s.data from durable.samples s where s.slot > $1::bigint and s.data is not null order by s.slot desc limit $2::int
