-- commit_parks: like commit_outcomes, for outcomes that park, or that follow an exception, or whose instance was parked or has an
--          inbox or children.
-- params   $1 to $16 as there, without $6 ahead (these never run ahead): arrays $1 id · $2 claim · $3 visit · $4 status · $5 step
--          $6 state · $7 result · $8 attempt · $9 advance · $10 delay · $11 last_error · $12 rekey · $13 new key;
--          $14 awaits text[] (each an array literal; null: none) · $15 keeps awaits boolean[] (a retry) · $16 await_step text[]
--          $17 timeout float8[] (seconds) · $18 error_type text[] · $19 traceback text[] (both empty: null for all)
--          $20 accept late commits boolean · $21 manual boundary text[] (JSON, of one that waits for a person; empty: null for all)
-- returns  id, visit, status, null, inbox. The inbox of an instance that is done is dropped. One that failed keeps its inbox, its
--          dedup keys and its awaits: a retry gets the same signals again
-- moves    next · retry · parked · asked · done · failed · cancelled
-- locks    the rows
-- index    gen_durable_pkey
-- keeps    I1, I3, I4, I8
-- fence    as there
update durable.gen_durable g
   set status = o.status::durable.durable_status,
       hold = case when o.status = 'runnable' then durable.hold_of(g.request) else 0 end,
       step = o.step,
       state = coalesce(o.state::jsonb, g.state),
       result = o.result::jsonb,
       attempt = o.attempt,
       visit = g.visit + o.advance,
       rev = least(g.rev, 9223372036854775806) + 1,
       crashes = case when o.advance > 0 then 0 else g.crashes end,
       round = case when o.advance > 0 then 0 else least(g.round, 2147483646) + 1 end,
       eligible_at = durable.now() + make_interval(secs => o.delay),
       last_error = o.last_error,
       error_type = o.error_type,
       traceback = o.traceback,
       partition_key = case when o.rekey then o.new_key else g.partition_key end,
       locked_by = null,
       lease_expires_at = null,
       finished_at = case when o.status in ('done', 'failed', 'cancelled') then durable.now() end,
       awaits = case when o.keeps or o.status in ('failed', 'cancelled') then g.awaits else o.awaits::text[] end,
       await_step = o.await_step,
       manual = case when o.manual is not null then o.manual::jsonb when o.advance = 0 and o.status <> 'done' then g.manual end,
       await_deadline = case when o.timeout is not null then durable.now() + make_interval(secs => o.timeout) end,
       children_total = case when o.advance > 0 then 0 else g.children_total end,  -- the barrier is the visit's
       children_pending = 0,
       wake_on_failure = false,
       updated_at = durable.now()
  from unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::int[], $9::int[],
              $10::float8[], $11::text[], $12::boolean[], $13::text[], $14::text[], $15::boolean[], $16::text[], $17::float8[],
              $18::text[], $19::text[], $21::text[])
       o(id, claim, visit, status, step, state, result, attempt, advance, delay, last_error, rekey, new_key, awaits, keeps,
         await_step, timeout, error_type, traceback, manual)
 where g.id = o.id and g.claim_id = o.claim and g.visit = o.visit and g.locked_by is not null
   and ($20::boolean or g.lease_expires_at > clock_timestamp())
   and (g.request is null or o.status in ('done', 'cancelled') or not durable.asked_to_cancel(g.request))
returning g.id, g.visit, g.status, null, g.inbox,
          case when g.inbox and o.status = 'done' then durable.drop_inbox(g.id) end
