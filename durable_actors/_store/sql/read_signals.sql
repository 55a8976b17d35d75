-- read_signals: unread signals of one instance after the id $2, the first $3.
-- params   $1 target bigint · $2 after bigint · $3 limit int
-- returns  target id, signal id, name, payload, dedup key, inserted_at
-- locks    none
-- index    signals_unread
select s.target_id, s.id, s.name, s.payload, s.dedup_key, s.inserted_at
  from durable.signals s
 where s.target_id = $1::bigint and s.consumed_at is null and s.id > $2::bigint
 order by s.id limit $3::int
