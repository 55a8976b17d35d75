-- consume_signals: take the signals that a committed step was handed out of the inbox; drop the inbox of what ended.
-- params   $1 target bigint[] · $2 signal bigint[] (pairs) · $3 ended instances bigint[]
-- returns  nothing
-- locks    the signals. Only for instances that this very transaction has written: a stale outcome consumes nothing, and an
--          outcome that is repeated after an unknown commit does not consume what came since.
-- index    signals_pkey, signals_inbox, signals_dedup, gen_durable_pkey
-- keeps    I6 a signal is consumed by exactly the commit that saw it. One with a dedup key stays as a tombstone.
with ours as materialized (
    select g.id, g.status in ('done', 'failed') as ended
      from durable.gen_durable g
     where g.id = any ($1::bigint[] || $3::bigint[]) and g.xmin = pg_current_xact_id()::xid
), gone as (
    delete from durable.signals s using ours
     where s.target_id = ours.id and ours.ended
), marked as (
    update durable.signals s set consumed_at = now()
      from unnest($1::bigint[], $2::bigint[]) p(target, signal), ours
     where ours.id = p.target and not ours.ended and s.id = p.signal and s.target_id = p.target
       and s.consumed_at is null and s.dedup_key is not null
)
delete from durable.signals s
 using unnest($1::bigint[], $2::bigint[]) p(target, signal), ours
 where ours.id = p.target and not ours.ended and s.id = p.signal and s.target_id = p.target and s.dedup_key is null
