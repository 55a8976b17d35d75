-- read_matching: the ids of all unread signals that match an instance's await, also beyond those that a step is shown.
-- params   $1 id bigint · $2 names text[]
-- returns  signal id
-- locks    none
-- index    signals_inbox
select s.id from durable.signals s
 where s.target_id = $1::bigint and s.name = any ($2::text[]) and s.consumed_at is null
