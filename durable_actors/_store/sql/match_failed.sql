-- match_failed: the oldest failed instances that a bulk command is meant for, among the next failed ones above an id. For operators.
-- params   $1 above this id bigint · $2 up to this id bigint · $3 window int (rows looked at) · $4 limit int · $5 statuses text[]
--          each may be null: $6 machine text · $7 queue text · $8 step text · $9 part of the error text · $10 tags text[]
--          $11 unchanged since timestamptz · $12 unique key bytea · $13 parent bigint · $14 due bool · $15 hold smallint
--          $16 paused bool · $17 what it waits for text (durable.waits_for)
-- returns  id or null (none passed), oldest first · its queue · its priority · how many rows were looked at · the highest id of them
-- locks    none
-- index    gen_durable_failed; match_instances is for a key or a parent
-- cost     the window's, whatever the table's size; the caller pages
with win as materialized (
    (select g.id, g.status, g.fsm, g.queue, g.step, g.priority, g.updated_at, g.eligible_at, g.hold,
            case when $16::bool is not null then g.request end as request, case when $17::text is not null then g.manual end as manual,
            case when $10::text[] is not null then g.tags end as tags, case when $9::text is not null then g.last_error end as last_error
       from durable.gen_durable g
      where $12::bytea is null and $13::bigint is null and g.status = 'failed' and g.id > $1::bigint and g.id <= $2::bigint order by g.id limit $3::int)
)
select f.id, f.queue, f.priority, w.looked, w.highest
  from (select count(*) as looked, max(y.id) as highest from win y) w
  left join (
    select y.id, y.queue, y.priority from win y
     where y.status::text = any ($5::text[])
       and ($6::text is null or y.fsm = $6::text)
       and ($7::text is null or y.queue = $7::text)
       and ($8::text is null or y.step = $8::text)
       and ($9::text is null or strpos(y.last_error, $9::text) > 0)
       and ($10::text[] is null or y.tags @> $10::text[])
       and ($11::timestamptz is null or y.updated_at < $11::timestamptz)
       and ($14::bool is null or durable.due(y.eligible_at) = $14::bool)
       and ($15::smallint is null or y.hold = $15::smallint)
       and ($16::bool is null or durable.is_paused(y.status, y.hold, y.request) = $16::bool)
       and ($17::text is null or durable.waits_for(y.status, y.manual) = $17::text)
     order by y.id limit $4::int) f on true
 order by f.id
