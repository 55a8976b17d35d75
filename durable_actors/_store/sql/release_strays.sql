-- release_strays: give back claims of ours that we do not know of: a pick was cut off after its commit.
-- params   $1 owner text · $2 queue text · $3 claims that we know of uuid[]
-- returns  id, queue, partition_key of the released ones
-- locks    FOR NO KEY UPDATE SKIP LOCKED in id order; one that is locked is left to its lease
-- index    gen_durable_executing, gen_durable_pkey
-- keeps    I2 one live claim per instance. The caller has no pick of this queue under way.
update durable.gen_durable g
   set status = 'runnable', hold = 0, rev = least(g.rev, 9223372036854775806) + 1,
       locked_by = null, lease_expires_at = null, claim_id = null, claim_token_hash = null, updated_at = now()
 where g.id = any (array(
    select y.id from durable.gen_durable y
     where y.id = any (array(
            select x.id from durable.gen_durable x
             where x.status = 'executing' and x.locked_by = $1::text and x.queue = $2::text and x.claim_id <> all ($3::uuid[])))
       and y.locked_by = $1::text and y.claim_id <> all ($3::uuid[])
     order by y.id for no key update skip locked))
returning g.id, g.queue, g.partition_key
