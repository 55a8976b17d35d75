-- sweep_keys: keys whose held rows nothing will release: no row of them is executing, and the first due one is held. A
--          safety net.
-- params   $1 keys after this one text · $2 limit int
-- returns  key, stuck boolean: all keys looked at, in order, so that the caller can continue after the last; a first row without
--          a key means that rows are held without a key (or the empty one, which no insert accepts): see free_holds
-- locks    none
-- index    gen_durable_held (one probe per key), gen_durable_key_executing, gen_durable_key
with recursive k(key) as (
    (select y.partition_key from durable.gen_durable y
      where y.status = 'runnable' and y.hold = 1 and y.partition_key > $1::text order by y.partition_key limit 1)
    union all
    select (select y.partition_key from durable.gen_durable y
             where y.status = 'runnable' and y.hold = 1 and y.partition_key > k.key order by y.partition_key limit 1)
      from k where k.key is not null
)
select null::text, true
 where $1::text = ''
   and (exists (select 1 from durable.gen_durable y where y.status = 'runnable' and y.hold = 1 and y.partition_key is null)
        or exists (select 1 from durable.gen_durable y where y.status = 'runnable' and y.hold = 1 and y.partition_key = ''))
union all
select k.key,
       not exists (select 1 from durable.gen_durable y where y.partition_key = k.key and y.status = 'executing')
       -- Not "no row is offered": that would read all 50,000 held rows of a busy key. One that is offered behind the first
       -- makes this an extra promotion, which is safe. Shelved, paused and waiting rows have given up their place.
       and coalesce((select y.hold from durable.gen_durable y
                      where y.partition_key = k.key and y.status = 'runnable' and durable.due(y.eligible_at) and y.hold <> 2
                        and durable.keeps_place(y.hold)
                        and (y.queue, '') not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                        and (y.queue, y.fsm) not in (select p.queue, p.fsm from durable.pauses p where durable.lasts(p.until))
                      order by y.priority, y.eligible_at, y.id limit 1) = 1, false)
  from (select key from k limit $2::int) k where k.key is not null
