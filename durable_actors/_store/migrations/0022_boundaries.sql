-- transaction: none
-- Manual boundaries: an instance that waits for a person, and what the person decided.
-- The column has the open boundary while the instance waits ("awaiting_signal", with no name that a signal could have), and with the key
-- "decision" what was decided, for the step that it led to. Wherever it is set in a live row `awaits` is not null: so commit_outcomes, which
-- writes most outcomes, never meets such a row. The step of an approval ("then") is in this column alone, and await_step is what its deadline
-- enters: whoever wakes a parked row in another way than by a decision (a node of an older release, a hand) approves nothing.

alter table durable.gen_durable add column if not exists manual jsonb;

comment on column durable.gen_durable.manual is 'durable_actors: the boundary where it waits for a person, or the decision that its step gets';

-- Who waits for a person, newest first. Dropped first: a build that was interrupted leaves an index that no query uses.
drop index concurrently if exists durable.gen_durable_manual;
create index concurrently gen_durable_manual on durable.gen_durable (id) where status = 'awaiting_signal' and manual is not null;

-- What a parked instance waits for: a signal, its children, or a person's decision (approval, pause); null if it is not parked.
-- One expression, which the planner inlines.
create or replace function durable.waits_for(status durable.durable_status, manual jsonb) returns text language sql immutable parallel safe as $$
    select case when status = 'awaiting_children' then 'children'
                when status = 'awaiting_signal' then case when manual is null or manual -> 'decision' is not null then 'signal'
                                                          else coalesce(manual ->> 'kind', 'signal') end end $$;

comment on function durable.waits_for is 'durable_actors: what a parked instance waits for';

-- The column without what only who may see an instance in full may see: data and comments.
create or replace function durable.shown_manual(manual jsonb) returns jsonb language sql immutable parallel safe as $$
    select case when manual is not null then jsonb_strip_nulls(jsonb_build_object(
        'kind', manual -> 'kind', 'then', manual -> 'then', 'title', manual -> 'title', 'on_reject', manual -> 'on_reject', 'on_timeout', manual -> 'on_timeout',
        'decision', case when manual -> 'decision' is not null then jsonb_build_object(
            'kind', manual #> '{decision,kind}', 'by', manual #> '{decision,by}', 'at', manual #> '{decision,at}') end)) end $$;

comment on function durable.shown_manual is 'durable_actors: a boundary or decision without its data';
