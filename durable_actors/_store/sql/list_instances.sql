-- list_instances: the newest instances that pass the filters, among the next $2 rows below an id. For people.
-- params   $1 below this id bigint · $2 window int (rows looked at) · $3 limit int
--          $4 status text or null · $5 machine text or null · $6 queue text or null
-- returns  id or null (none passed), newest first · how many rows were looked at · the lowest id of them
-- locks    none
-- index    gen_durable_pkey, backwards: the cost is the window's, whatever the table's size; the caller pages
with win as materialized (
    select g.id, g.status, g.fsm, g.queue from durable.gen_durable g where g.id < $1::bigint order by g.id desc limit $2::int
)
select f.id, w.looked, w.lowest
  from (select count(*) as looked, min(y.id) as lowest from win y) w
  left join (
    select y.id from win y
     where ($4::text is null or y.status = $4::text::durable.durable_status)
       and ($5::text is null or y.fsm = $5::text)
       and ($6::text is null or y.queue = $6::text)
     order by y.id desc limit $3::int) f on true
 order by f.id desc
