-- promote_siblings: offer the first held row of each key to the pick again. An extra promotion is always safe.
-- params   $1 keys text[]: the keys of rows that left 'executing'
-- returns  id, queue, priority, eligible_at of the rows now offered
-- moves    offered
-- locks    FOR NO KEY UPDATE SKIP LOCKED; runs in the transaction of the write that freed the key, as a later statement, so
--          that its snapshot sees what was held behind that row
-- index    gen_durable_held, gen_durable_pkey, pauses_pkey
-- plan     two hashed subplans over `pauses`, which is nearly always empty: an anti-join would sort the rows of the key
-- keeps    I7 no wake-up is lost. Rows of a paused queue or machine have given up their place: the first of the others is offered
update durable.gen_durable g set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
 where g.id = any (array(
    select h.id from unnest($1::text[]) u(key)
     cross join lateral (
        select y.id from durable.gen_durable y
         where y.partition_key = u.key and y.status = 'runnable' and y.hold = 1
           and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
           and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
         order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h))
returning g.id, g.queue, g.priority, g.eligible_at,
          case when g.journal >= 3 then durable.note(g.id, g.rev, 'offered', g.step, null, g.visit, g.attempt, g.round) end
