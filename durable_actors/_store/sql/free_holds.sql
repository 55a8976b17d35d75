-- free_holds: offer rows that are held without a key. Only SQL by hand makes them; sweep_keys finds held rows by key.
-- params   $1 limit int
-- returns  nothing; the polls find them
-- moves    offered
-- locks    FOR NO KEY UPDATE SKIP LOCKED
-- index    gen_durable_held
-- keeps    I7 no wake-up is lost. The empty key counts as no key: no insert accepts it, and the sweep begins after it.
update durable.gen_durable g set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
 where g.id = any (array(
    select y.id from durable.gen_durable y
     where y.status = 'runnable' and y.hold = 1 and y.partition_key is null
     order by y.priority, y.eligible_at, y.id limit $1::int for no key update skip locked) || array(
    select y.id from durable.gen_durable y
     where y.status = 'runnable' and y.hold = 1 and y.partition_key = ''
     order by y.priority, y.eligible_at, y.id limit $1::int for no key update skip locked))
returning case when g.journal >= 3 then durable.note(g.id, g.rev, 'offered', g.step, null, g.visit, g.attempt, g.round) end
