-- park_parent: the second half of scheduling children, in the transaction that inserted them under lock_parent.
-- params   $1 id bigint · $2 then text · $3 state text or null · $4 children int · $5 needed int · $6 wake on failure boolean
--          $7 timeout float8 or null · for the journal, as they were: $8 step text · $9 attempt int · $10 node text · $11 round int ·
--          $12 end of the lease timestamptz or null · $13 the error of a handled failure text (JSON) or null · $14 the definition that ran it
--          text, or null: the one that the instance was started with · $15 cancel the children that live when the barrier opens boolean
-- returns  id, visit, status
-- moves    spawned
-- locks    the row is ours
-- index    gen_durable_pkey
-- keeps    I11. No child was inserted, or none is needed: the step is entered at once.
update durable.gen_durable g
   set status = (case when $5::int > 0 then 'awaiting_children' else 'runnable' end)::durable.durable_status,
       hold = case when $5::int > 0 then 0 else durable.hold_of(g.request) end,
       step = case when $5::int > 0 then g.step else $2::text end,
       await_step = case when $5::int > 0 then $2::text end,
       await_deadline = case when $5::int > 0 and $7::float8 is not null then durable.now() + make_interval(secs => $7::float8) end,
       state = coalesce($3::text::jsonb, g.state),
       attempt = 0, crashes = 0, round = 0, visit = g.visit + 1, rev = least(g.rev, 9223372036854775806) + 1, eligible_at = durable.now(), last_error = null, error_type = null, traceback = null, awaits = null, manual = null,
       children_total = $4::int, children_pending = $5::int, wake_on_failure = $6::boolean and $5::int > 0,
       cancel_rest = case when $15::boolean and $5::int > 0 then true when g.cancel_rest is not null then false end,
       locked_by = null, lease_expires_at = null, updated_at = durable.now()
 where g.id = $1::bigint
returning g.id, g.visit, g.status,
          case when g.journal >= 2 then durable.note(
              g.id, g.rev, 'spawned', $8::text, $2::text, g.visit - 1, $9::int, $11::int, g.claim_id, $10::text, $13::text::jsonb,
              jsonb_strip_nulls(jsonb_build_object('children_total', $4::int, 'children_pending', $5::int, 'folded', case when g.journal < 3 then '{}'::jsonb end, 'wake_on_failure', g.wake_on_failure,
                                                   'deadline', g.await_deadline, 'renewed_until', $12::timestamptz,
                                                   'late', case when $12::timestamptz <= durable.now() then true end, 'definition', $14::text))
              || case when g.cancel_rest is not null then jsonb_build_object('columns', jsonb_build_object('cancel_rest', g.cancel_rest)) else '{}' end
              || case when g.journal = 4 then jsonb_build_object('state', g.state) else '{}' end) end
