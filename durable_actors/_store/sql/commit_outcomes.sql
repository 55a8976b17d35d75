-- commit_outcomes: write the outcomes of many steps, each refused unless its claim is still current.
-- params   arrays, one element per outcome: $1 id bigint[] · $2 claim uuid[] · $3 visit bigint[] · $4 key text[] (the claim's)
--          $5 status durable_status[] · $6 ahead boolean[] (stay executing on this claim, unless a due sibling of the key waits)
--          $7 step text[] · $8 state text[] (null keeps it) · $9 result text[] · $10 attempt int[] · $11 advance int[] (visit += 0 or 1)
--          $12 delay float8[] (seconds from now) · $13 last_error text[] · $14 rekey boolean[] · $15 new key text[]
--          $16 accept late commits boolean. Of visit, status, ahead, step, attempt, advance and delay one element may stand for
--          all; key, state, result, last_error, rekey and new key may be empty: null for all. To read and to unnest an array
--          costs 0.1 µs a row, and a batch mostly says the same: 2.0 instead of 3.2 µs a row before the first row is touched.
-- returns  per committed row: id, visit, status, the stored state if it stays executing (the next step gets it), and whether a
--          signal was ever sent to it. A missing id was stale: nothing of it was changed. The inbox of an instance that is done is
--          dropped; one that failed keeps its inbox and its dedup keys, because it may be retried.
-- moves    next · retry · done · failed · cancelled
-- locks    the rows, in the planner's order: two flushes never share a row, because a claim has one owner
-- index    gen_durable_pkey (driven from the arrays), gen_durable_key for the sibling probe
-- keeps    I1 commit before proceed · I3 the fence only grows · I4 a stale write changes nothing · I8 terminal rows never change.
--          round counts the committed outcomes of a visit; only this statement and commit_parks change it, not reap, release or
--          wake. So a re-run after a crash finds what it sent without a key, and a run after a committed outcome sends anew
-- fence    (id, claim, visit), and locked_by for "executing": naming the status would let the planner drive the batch from
--          the index of executing rows. Completion keeps claim_id, so that a repeated commit can be recognised.
--          Under a request to cancel only an end in "done" or "cancelled" is committed. Any other one is as stale; read_claims tells why.
update durable.gen_durable g
   set status = case when o.stays and not durable.asked_to_pause(g.request) then 'executing' else o.status end,
       hold = case when o.status = 'runnable' then durable.hold_of(g.request) else 0 end,
       step = o.step,
       state = coalesce(o.state::jsonb, g.state),
       result = o.result::jsonb,
       attempt = o.attempt,
       visit = g.visit + o.advance,
       rev = least(g.rev, 9223372036854775806) + 1,
       crashes = case when o.advance > 0 then 0 else g.crashes end,
       round = case when o.advance > 0 then 0 else least(g.round, 2147483646) + 1 end,
       -- Untouched when running ahead: no indexed column changes, the update is HOT (241 instead of 355 bytes of WAL).
       eligible_at = case when o.stays and not durable.asked_to_pause(g.request) then g.eligible_at when o.delay = 0 then durable.now()
                          else durable.now() + make_interval(secs => o.delay) end,
       last_error = o.last_error,
       error_type = null,  -- what follows an exception is written by commit_parks
       traceback = null,
       partition_key = case when o.rekey then o.new_key else g.partition_key end,
       locked_by = case when o.stays and not durable.asked_to_pause(g.request) then g.locked_by end,
       lease_expires_at = case when o.stays and not durable.asked_to_pause(g.request) then g.lease_expires_at end,
       finished_at = case when o.status in ('done', 'failed', 'cancelled') then durable.now() end,
       updated_at = durable.now()
  from (select u.id, u.claim, coalesce(u.visit, ($3::bigint[])[1]) as visit, coalesce(u.status, ($5::durable.durable_status[])[1]) as status,
               coalesce(u.step, ($7::text[])[1]) as step, u.state, u.result, coalesce(u.attempt, ($10::int[])[1]) as attempt,
               coalesce(u.advance, ($11::int[])[1]) as advance, coalesce(u.delay, ($12::float8[])[1]) as delay,
               u.last_error, u.rekey, u.new_key,
               coalesce(u.ahead, ($6::boolean[])[1]) and (u.key is null or not exists (
                   select 1 from durable.gen_durable y
                    where y.partition_key = u.key and y.status = 'runnable' and durable.due(y.eligible_at)
                      and durable.keeps_place(y.hold))) as stays
          from unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::text[], $5::durable.durable_status[], $6::boolean[], $7::text[], $8::text[],
                      $9::text[], $10::int[], $11::int[], $12::float8[], $13::text[], $14::boolean[], $15::text[])
               u(id, claim, visit, key, status, ahead, step, state, result, attempt, advance, delay, last_error, rekey, new_key)
       ) o
 where g.id = o.id and g.claim_id = o.claim and g.visit = o.visit and g.locked_by is not null
   and ($16::boolean or g.lease_expires_at > clock_timestamp())
   and (g.request is null or o.status in ('done', 'cancelled') or not durable.asked_to_cancel(g.request))
returning g.id, g.visit, g.status, case when g.locked_by is not null then g.state end, g.inbox,
          case when g.inbox and o.status = 'done' then durable.drop_inbox(g.id) end
