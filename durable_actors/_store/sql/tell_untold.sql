-- tell_untold: tell the dependents of instances that ended in another way than by the commit of an outcome, which tells them itself.
-- params   $1 how many of these instances int
-- returns  id, queue of the dependents that are offered now; first a row with how many instances it looked at, and null
-- moves    unblocked · doomed
-- locks    rows of `untold`, FOR UPDATE SKIP LOCKED in id order: any number of nodes work on different ones. Then as lock_owed and
--          tell_dependents. One statement, so that no caller can forget what it took
-- index    untold_pkey, and theirs
select t.id, t.queue from durable.tell_untold($1::int) t
