-- sample_states: the states of some live instances, for a deploy gate that tries to read them.
-- params   $1 machine text · $2 version int · $3 limit int
-- returns  id, step, state: of each step the newest ones
-- locks    none
-- index    none: READS THE WHOLE TABLE, as count_versions
select s.id, s.step, s.state from (
    select g.id, n.step, g.state, row_number() over (partition by n.step order by g.id desc) as place
      from durable.gen_durable g
     cross join lateral (
         select coalesce(case when g.status = 'awaiting_signal' and g.manual is not null then g.manual ->> 'then'
                              when g.status in ('awaiting_signal', 'awaiting_children') then g.await_step end, g.step) as step) n
     where g.fsm = $1::text and g.fsm_version = $2::int and g.finished_at is null) s
 where s.place <= $3::int
 order by s.id
