-- signal_from_step: send_signals, refused unless the claim of the sending step is current.
-- params   $1 target bigint[] (null: by key) · $2 unique key bytea[] · $3 name text[] · $4 payload text[] · $5 dedup key text[]
--          $6 sender bigint · $7 claim uuid · $8 visit bigint
-- returns  as send_signals; nothing when the claim is stale
-- moves    woken · signalled
-- locks    the targets, in id order. Not the sender: two instances that signal each other would wait for each other. The claim was
--          current when the statement began, which is when the signal counts as sent.
-- index    gen_durable_pkey, gen_durable_unique, signals_dedup
-- keeps    I4 a stale write changes nothing · I7 no wake-up is lost
select s.target, s.outcome, s.queue, s.woken
  from durable.gen_durable g
  -- The arguments depend on the sender's row, so the function is called for that row or not at all.
 cross join lateral durable.send_signals(case when g.id is not null then $1::bigint[] end, $2::bytea[], $3::text[],
                                         $4::text[]::jsonb[], $5::text[]) s
 where g.id = $6::bigint and g.claim_id = $7::uuid and g.visit = $8::bigint and g.locked_by is not null
 order by s.ord
