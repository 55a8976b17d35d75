-- read_orphans: claims of ours that we do not know of: a pick was cut off after its commit.
-- params   $1 owner text · $2 queue text · $3 claims that we know of uuid[]
-- returns  id, claim_id, partition_key, parent_id
-- locks    none
-- index    gen_durable_executing
-- keeps    I2 one live claim per instance. The caller has no pick of this queue under way. They are given back by their claims
--          (release_claims): an update that says what to keep would, carried out late, take what was claimed since.
select g.id, g.claim_id, g.partition_key, g.parent_id
  from durable.gen_durable g
 where g.status = 'executing' and g.locked_by = $1::text and g.queue = $2::text and g.claim_id <> all ($3::uuid[])
 order by g.id
