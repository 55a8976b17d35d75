-- release_claims: release claims without an outcome (drain, a contended key); not counted as crashes.
-- params   $1 id bigint[] · $2 claim uuid[] · $3 attempts to add int (0: never ran, or a drain ended it · 1: was cancelled) ·
--          $4 hold smallint (1: its key is busy elsewhere; it keeps its place and is offered again later · 2: this node's code
--          lost its step; shelved) · $5 interruptions to add int (1: a drain ended its run)
-- returns  id, queue, partition_key of the released ones
-- locks    FOR NO KEY UPDATE SKIP LOCKED in id order; one that is locked is not released: the flusher tries it again
-- index    gen_durable_pkey
-- keeps    I4 a stale write changes nothing. Counters stop at their ends: an overflow would refuse the whole batch, for ever.
update durable.gen_durable g
   set status = 'runnable', hold = $4::smallint,
       shelved_step = case when $4::smallint = 2 then g.step else g.shelved_step end, attempt = least(g.attempt, 2147483647 - $3::int) + $3::int,
       interruptions = least(g.interruptions, 2147483647 - $5::int) + $5::int, rev = least(g.rev, 9223372036854775806) + 1,
       locked_by = null, lease_expires_at = null, claim_id = null, claim_token_hash = null, updated_at = now()
 where g.id = any (array(
    select y.id from unnest($1::bigint[], $2::uuid[]) u(id, claim)
      join durable.gen_durable y on y.id = u.id and y.claim_id = u.claim and y.locked_by is not null
     order by y.id for no key update of y skip locked))
returning g.id, g.queue, g.partition_key
