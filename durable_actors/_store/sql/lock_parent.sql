-- lock_parent: lock the row of a claim for a transaction that writes other rows (children); nothing if the claim is stale,
--          or if its node was asked to cancel it.
-- params   $1 id bigint · $2 claim uuid · $3 visit bigint · $4 accept late commits boolean
-- returns  id, or nothing
-- locks    FOR NO KEY UPDATE: until the transaction ends no reaper takes it, no signal changes it and nobody asks to cancel it
-- index    gen_durable_pkey
-- keeps    I4 a stale write changes nothing
select g.id from durable.gen_durable g
 where g.id = $1::bigint and g.claim_id = $2::uuid and g.visit = $3::bigint and g.locked_by is not null
   and ($4::boolean or g.lease_expires_at > clock_timestamp()) and not durable.asked_to_cancel(g.request)
   for no key update
