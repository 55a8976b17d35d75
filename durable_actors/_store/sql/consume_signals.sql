-- consume_signals: remove the signals that a committed outcome consumes from the inbox.
-- params   $1 target bigint[] · $2 signal bigint[] (pairs)
-- returns  nothing
-- locks    the signals. Only for instances that this transaction has written: a stale outcome consumes nothing, and an
--          outcome that is repeated after an unknown commit does not consume signals that arrived since.
-- index    signals_pkey, gen_durable_pkey: one probe of each per pair
-- keeps    I6 a signal is consumed by exactly the commit that saw it. One with a dedup key stays as a tombstone.
with ours as materialized (
    select p.target, p.signal
      from unnest($1::bigint[], $2::bigint[]) p(target, signal)
      join durable.gen_durable g on g.id = p.target
     where g.xmin = pg_current_xact_id()::xid
), marked as (
    update durable.signals s set consumed_at = durable.now()
      from ours o
     where s.id = o.signal and s.target_id = o.target and s.consumed_at is null and s.dedup_key is not null
)
delete from durable.signals s
 using ours o
 where s.id = o.signal and s.target_id = o.target and s.dedup_key is null
