-- send_signals: deliver signals and wake the instances that await them.
-- params   $1 target bigint[] (null: by key) · $2 unique key bytea[] · $3 name text[] · $4 payload text[] · $5 dedup key text[]
-- returns  per signal, in input order: target id · outcome (sent, duplicate, no_target) · queue · whether it woke the target
-- moves    woken · signalled
-- locks    the targets, in id order, whatever their status; until the caller's transaction ends
-- index    gen_durable_pkey, gen_durable_unique, signals_dedup
-- keeps    I7 no wake-up is lost
select s.target, s.outcome, s.queue, s.woken
  from durable.send_signals($1::bigint[], $2::bytea[], $3::text[], $4::text[]::jsonb[], $5::text[]) s
 order by s.ord
