-- read_inboxes: the unread signals of claimed instances, the first $2 of each, oldest first; what a person decided for them; the slot of a
--          schedule for which they were started.
-- params   $1 id bigint[] · $2 limit int
-- returns  target id, signal id, name, payload, dedup key, inserted_at; of a decision only the target's id and the payload;
--          of a slot, too, with the name `schedule`
-- locks    none
-- index    signals_unread, gen_durable_pkey
select s.target_id, s.id, s.name, s.payload, s.dedup_key, s.inserted_at
  from unnest($1::bigint[]) u(id)
 cross join lateral (
    select y.* from durable.signals y
     where y.target_id = u.id and y.consumed_at is null order by y.id limit $2::int) s
union all
select g.id, null, v.name, v.value, null, null
  from durable.gen_durable g
 cross join lateral (values (null, g.manual -> 'decision'), ('schedule', g.meta -> 'durable:schedule')) v(name, value)
 where g.id = any ($1::bigint[]) and v.value is not null
