-- read_tree: the family of an instance: its ancestors, and the descendants of the first of them, level by level. For operators.
-- params   $1 id bigint · $2 levels below the instance int · $3 children of each int · $4 descendants int · $5 ancestors int
-- returns  per instance, in no order: id, parent, level below the first ancestor, fsm, version, step, status, queue, attempt, owner, hold,
--          seconds until it is eligible, seconds until its deadline, awaits, children pending, children total, the error (its first 500
--          characters), inserted_at, finished_at, {status: children}, rerun_of, its key among the children of its barrier, the first 20 that
--          it comes after (an array, or null), how many these are, for how many of them it waits
-- locks    none
-- index    gen_durable_pkey, gen_durable_parent, graph_pkey
-- cost     linear in the instances that are returned and all their children. Of the children of one those that have not ended come first,
--          then those that failed. The ancestors are returned whatever the limits say.
-- plan     the recursion is read as far as the limit needs it: nothing sorts it
-- hostile  a row that a hand has made its own ancestor ends the way up and down
with recursive up(id, parent_id, level, path) as (
    select g.id, g.parent_id, 0, array[g.id] from durable.gen_durable g where g.id = $1::bigint
    union all
    select p.id, p.parent_id, u.level + 1, u.path || p.id
      from up u join durable.gen_durable p on p.id = u.parent_id
     where u.level < $5::int and p.id <> all (u.path)
), line as materialized (
    select u.id, (select max(v.level) from up v) - u.level as level from up u
), down(id, level, path) as (
    select l.id, l.level, array[l.id] from line l where l.level = 0
    union all
    select c.id, d.level + 1, d.path || c.id
      from down d
     cross join lateral (
        select y.id from durable.gen_durable y where y.parent_id = d.id
         order by case when y.finished_at is null then 0 when y.status::text <> 'done' then 1 else 2 end, y.id limit $3::int) c
     where d.level < (select max(l.level) from line l) + $2::int and c.id <> all (d.path)
), family as materialized (
    select l.id, l.level from line l
    union
    select f.id, f.level from (select d.id, d.level from down d limit $4::int) f
)
select g.id, g.parent_id, f.level, g.fsm, g.fsm_version, g.step, g.status, g.queue, g.attempt, g.locked_by, g.hold,
       (extract(epoch from g.eligible_at) - extract(epoch from durable.now()))::float8,
       (extract(epoch from g.await_deadline) - extract(epoch from durable.now()))::float8,
       g.awaits, g.children_pending, g.children_total, left(g.last_error, 500), g.inserted_at, g.finished_at,
       (select jsonb_object_agg(c.status, c.children) from (
           select y.status::text, count(*) as children from durable.gen_durable y where y.parent_id = g.id group by y.status) c), g.rerun_of,
       g.child_key, e.needs[1:20], coalesce(cardinality(e.needs), 0), coalesce(e.waits, 0)
  from family f
  join durable.gen_durable g on g.id = f.id
  left join durable.graph e on e.id = g.id and g.links is not null
