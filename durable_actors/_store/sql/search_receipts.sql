-- search_receipts: the newest receipts that pass the filters, among the next rows below an id. For the dashboard.
-- params   $1 below this id bigint · $2 window int (rows looked at) · $3 limit int
--          each may be null: $4 command text · $5 scope text · $6 by whom text · $7 part of the target text
-- returns  id or null (none passed), newest first · at · command · scope · target · by · reason · idempotency_key · data · result
--          · how many rows were looked at · the lowest id of them
-- locks    none
-- index    receipts_pkey, backwards: the cost is the window's, however many commands there were; the caller pages
with win as materialized (
    select r.id, r.command, r.scope, r.target, r.by from durable.receipts r where r.id < $1::bigint order by r.id desc limit $2::int
), found as materialized (
    select y.id from win y
     where ($4::text is null or y.command = $4::text)
       and ($5::text is null or y.scope = $5::text)
       and ($6::text is null or y.by = $6::text)
       and ($7::text is null or strpos(y.target, $7::text) > 0)
     order by y.id desc limit $3::int
)
select r.id, r.at, r.command, r.scope, r.target, r.by, r.reason, r.idempotency_key, r.data, r.result, w.looked, w.lowest
  from (select count(*) as looked, min(y.id) as lowest from win y) w
  left join (found f join durable.receipts r on r.id = f.id) on true
 order by r.id desc
