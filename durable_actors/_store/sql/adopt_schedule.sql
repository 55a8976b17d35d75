-- adopt_schedule: record that a node's code has a schedule, while another definition of it counts: an operator's, or the same one.
-- params   $1 name text · $2 the rev that it was read at bigint · $3 revisions text[]
-- returns  its new rev; nothing if somebody else has changed it
-- locks    the schedule's row
-- index    schedules_pkey
-- keeps    its definition. That of an operator who was there before the code replaces the code's, and shows
update durable.schedules s
   set overridden = case when s.origin = 'api' then coalesce(s.overridden, jsonb_build_object('at', s.changed_at)) else s.overridden end,
       origin = 'code', revisions = $3::text[], disabled_at = null, rev = s.rev + 1
 where s.name = $1::text and s.rev = $2::bigint
returning s.rev
