-- renew_leases: extend claims that are still ours.
-- params   $1 id bigint[] · $2 claim uuid[] · $3 lease seconds float8
-- returns  the renewed claim ids with their new ends, not row ids: one node may have two claims of an instance, one of which is lost. A missing
--          one is not necessarily lost: its row may be locked; read_claims decides.
-- moves    renewed
-- locks    FOR NO KEY UPDATE SKIP LOCKED in id order: never waits, never deadlocks with other maintenance
-- index    gen_durable_pkey. No indexed column changes: the update is HOT.
-- keeps    I2 one live claim per instance
update durable.gen_durable g
   set lease_expires_at = pg_catalog.now() + make_interval(secs => $3::float8)
 where g.id = any (array(
    select y.id from unnest($1::bigint[], $2::uuid[]) u(id, claim)
      join durable.gen_durable y on y.id = u.id and y.claim_id = u.claim and y.locked_by is not null
     order by y.id for no key update of y skip locked))
returning g.claim_id, g.lease_expires_at
