-- read_inboxes: the unread signals of claimed instances, the first $2 of each, oldest first; and what a person decided for them.
-- params   $1 id bigint[] · $2 limit int
-- returns  target id, signal id, name, payload, dedup key, inserted_at; of a decision only the target's id and the payload
-- locks    none
-- index    signals_unread, gen_durable_pkey
select s.target_id, s.id, s.name, s.payload, s.dedup_key, s.inserted_at
  from unnest($1::bigint[]) u(id)
 cross join lateral (
    select y.* from durable.signals y
     where y.target_id = u.id and y.consumed_at is null order by y.id limit $2::int) s
union all
select g.id, null, null, g.manual -> 'decision', null, null
  from durable.gen_durable g
 where g.id = any ($1::bigint[]) and g.manual -> 'decision' is not null
