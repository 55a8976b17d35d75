-- read_limits: the limits, and of their keys those under which instances wait, have a slot, or have spent tokens.
-- params   $1 how many keys of each limit int: those under which somebody waits come first · $2 instances to count of each key and queue int
--          $3 lines to look at int, of each kind: keys under which somebody waits, executing rows with a slot, kept slots, keys that have been charged
--          $4 only the limit of this name text, or null · $5 only keys that contain this text, or null
-- returns  one JSON object per limit, also per limit that nobody has declared and instances wait for; `keys_total` counts the keys that are
--          not at rest, `capped` says that there were more lines than were looked at
-- locks    none
-- index    limits_pkey, gen_durable_throttled, gen_durable_slots, kept_slots_key, limit_keys_pkey, limit_waits_pkey
-- cost     linear in the lines that are looked at, and in the instances that are counted: $1 keys of each limit, $2 of each
with waits as materialized (
    select w.key from durable.limit_waits w limit $3::int
), takes as materialized (
    select durable.slot_of(y.rate_limit) as key from durable.gen_durable y
     where y.status = 'executing' and y.rate_limit is not null and durable.slot_of(y.rate_limit) is not null limit $3::int
), kept as materialized (
    select k.key from durable.kept_slots k limit $3::int
), charged as materialized (
    select s.key, s.tat > durable.now() or coalesce(s.blocked > durable.now(), false) as busy from durable.limit_keys s limit $3::int
), busy as (
    select x.key, split_part(x.key, ':', 1) as name, bool_or(x.waits) as waits
      from (select w.key, true from waits w union all select t.key, false from takes t union all
            select k.key, false from kept k union all
            select c.key, false from charged c where c.busy) x(key, waits)
     where ($4::text is null or split_part(x.key, ':', 1) = $4::text) and ($5::text is null or strpos(x.key, $5::text) > 0)
     group by x.key
), ranked as materialized (
    select b.key, b.name, row_number() over (partition by b.name order by b.waits desc, b.key) as n, count(*) over (partition by b.name) as total
      from busy b
), names as (
    select l.name from durable.limits l where $4::text is null or l.name = $4::text
    union
    select r.name from ranked r
)
select jsonb_build_object(
    'name', n.name, 'declared', l.declared, 'declared_at', l.declared_at, 'declared_by', l.declared_by, 'override', l.override,
    'set_at', l.set_at, 'set_by', l.set_by, 'reason', l.reason, 'known', l.name is not null, 'interval', l.interval, 'burst', l.burst, 'slots', l.slots,
    'on_full', coalesce(l.on_full, 'wait'), 'held', coalesce(l.held, 'step'),
    'keys_total', (select coalesce(max(k.total), 0) from ranked k where k.name = n.name),
    'capped', $3::int <= greatest((select count(*) from waits), (select count(*) from takes), (select count(*) from kept), (select count(*) from charged)),
    'keys', (select coalesce(jsonb_agg(k.about order by k.n), '[]') from (
        select b.n, jsonb_build_object(
                   'key', b.key,
                   'spent', case when l.interval > 0 then round((coalesce(durable.spent(s.tat, s.at, durable.now()), 0) / l.interval)::numeric, 3) end,
                   'blocked_until', case when s.blocked > durable.now() then s.blocked end,
                   'next_at', (select min(w.next_at) from durable.limit_waits w where w.key = b.key),
                   'waiting', (select coalesce(sum(c.n), 0) from durable.limit_waits w cross join lateral (
                        select count(*) as n from (
                            select 1 from durable.gen_durable y
                             where y.status = 'runnable' and y.hold = 3 and y.queue = w.queue and y.limited_by = b.key limit $2::int) x) c
                        where w.key = b.key),
                   'first', (select coalesce(jsonb_agg(f.id order by f.priority, f.eligible_at, f.id), '[]') from (
                        select y.id, y.priority, y.eligible_at from durable.limit_waits w cross join lateral (
                            select y.id, y.priority, y.eligible_at from durable.gen_durable y
                             where y.status = 'runnable' and y.hold = 3 and y.queue = w.queue and y.limited_by = b.key
                             order by y.queue, y.limited_by, y.priority, y.eligible_at, y.id limit 3) y
                         where w.key = b.key order by y.priority, y.eligible_at, y.id limit 3) f),
                   'taken', (select count(*) from (
                        select 1 from durable.holders(b.key) limit 10001) t),
                   'holders', (select coalesce(jsonb_agg(h.id order by h.id), '[]') from (
                        select y.id from durable.holders(b.key) y(id) limit 20) h)) as about
          from ranked b left join durable.limit_keys s on s.key = b.key
         where b.name = n.name and b.n <= $1::int) k))
  from names n left join durable.limits l on l.name = n.name
 order by n.name
