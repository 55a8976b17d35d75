-- read_awaited: the unread signals that match an instance's await, oldest first, the first $3.
-- params   $1 id bigint · $2 names text[] · $3 limit int
-- returns  target id, signal id, name, payload, dedup key, inserted_at
-- locks    none
-- index    signals_inbox
select s.target_id, s.id, s.name, s.payload, s.dedup_key, s.inserted_at
  from durable.signals s
 where s.target_id = $1::bigint and s.name = any ($2::text[]) and s.consumed_at is null
 order by s.id limit $3::int
