-- park_parent: the second half of scheduling children, in the transaction that inserted them under lock_parent.
-- params   $1 id bigint · $2 then text · $3 state text or null · $4 children int · $5 needed int · $6 wake on failure boolean
--          $7 timeout float8 or null
-- returns  id, visit, status
-- locks    the row is ours
-- index    gen_durable_pkey
-- keeps    I11. No child was inserted, or none is needed: the step is entered at once.
update durable.gen_durable g
   set status = (case when $5::int > 0 then 'awaiting_children' else 'runnable' end)::durable.durable_status,
       step = case when $5::int > 0 then g.step else $2::text end,
       await_step = case when $5::int > 0 then $2::text end,
       await_deadline = case when $5::int > 0 and $7::float8 is not null then now() + make_interval(secs => $7::float8) end,
       state = coalesce($3::text::jsonb, g.state),
       attempt = 0, crashes = 0, round = 0, visit = g.visit + 1, rev = least(g.rev, 9223372036854775806) + 1, eligible_at = now(), last_error = null, error_type = null, traceback = null, awaits = null,
       children_total = $4::int, children_pending = $5::int, wake_on_failure = $6::boolean,
       locked_by = null, lease_expires_at = null, updated_at = now()
 where g.id = $1::bigint
returning g.id, g.visit, g.status
