-- heartbeat: extend the lease of a runner's claim.
-- params   $1 id bigint · $2 claim uuid · $3 token text · $4 lease seconds float8
-- returns  end of the lease, what a command asks of the runner (JSON) or null. Refused with RD001 if the claim is not current
-- moves    renewed
-- locks    FOR NO KEY UPDATE SKIP LOCKED: of a locked row the old end is returned
-- index    gen_durable_pkey
-- keeps    I2 one live claim per instance
select h.lease_until, h.request from durable.heartbeat($1::bigint, $2::uuid, $3::text, make_interval(secs => $4::float8)) h
