-- enable_schedules: disable schedules that no live node has in its code, or enable them again.
-- params   $1 their names text[] · $2 enable boolean
-- returns  the names of those that changed
-- locks    their rows, in the order of the names
-- index    schedules_pkey
-- keeps    where they stand: slots that passed meanwhile are missed ones, and the schedule says what that means
update durable.schedules s set disabled_at = case when $2::boolean then null else durable.now() end, rev = s.rev + 1
 where s.name in (select y.name from durable.schedules y
                   where y.name = any ($1::text[]) and y.origin = 'code' and (y.disabled_at is not null) = $2::boolean
                   order by y.name for no key update skip locked)
returning s.name
