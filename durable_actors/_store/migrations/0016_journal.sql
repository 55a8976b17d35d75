-- The journal: what happened to an instance, one record per move of its row, written in the transaction of the move.
-- Execution never reads it. `journal_*.sql` and durable.note write it; history, verify and rebuild read it.

alter table durable.gen_durable
    add column journal     smallint not null default 0,  -- what is recorded: 0 nothing · 1 failed attempts · 2 outcomes · 3 every move ·
                                                         -- 4 with state, result and payloads
    alter column rev set default 1,                      -- an insert is the first move
    add column fingerprint bytea;                        -- of the definition that it was started with; null: unknown

-- Keyed by the instance and the row's `rev` after the move: rev counts every move, so at levels 3 and 4 there is no gap.
-- No foreign key: retention deletes both, and a record outlives a row that was deleted by hand.
create table durable.journal (
    instance_id bigint not null,
    rev         bigint not null,
    at          timestamptz not null default durable.now(),
    visit       bigint,                                    -- before the move, as attempt and step
    seconds     float8,                                    -- how long the step ran
    claim_id    uuid,
    attempt     int,
    kind        text not null,                             -- the name of the move (`_store/moves.py`)
    step        text,
    to_step     text,                                      -- the step that it enters, now or when it is woken
    node        text,                                      -- who ran it
    by          text,                                      -- who commanded it
    error       jsonb,                                     -- type, text, traceback of the attempt that failed
    data        jsonb,
    primary key (instance_id, rev)
) with (autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.1);

comment on table durable.journal is 'durable_actors: the history of instances; append-only';

-- Records are never changed. Retention deletes them through durable.forget_journal.
create function durable.keep_journal() returns trigger language plpgsql as $$
begin
    if coalesce(current_setting('durable_actors.journal_door', true), '') <> 'open' then
        raise exception 'the journal is append-only: % is refused', tg_op
            using errcode = 'restrict_violation', hint = 'durable.forget_journal deletes the records of instances';
    end if;
    return null;
end $$;

create trigger journal_append_only before update or delete or truncate on durable.journal
    for each statement execute function durable.keep_journal();

-- Delete the records of these instances up to a revision; returns how many.
create function durable.forget_journal(ids bigint[], up_to bigint default 9223372036854775807) returns bigint
language plpgsql volatile as $$
declare
    gone bigint;
begin
    perform set_config('durable_actors.journal_door', 'open', true);
    delete from durable.journal j where j.instance_id = any (ids) and j.rev <= up_to;
    get diagnostics gone = row_count;
    perform set_config('durable_actors.journal_door', '', true);
    return gone;
end $$;

-- Record one move. Called in the RETURNING of the statement that makes it, for rows whose level asks for it: rows that are not
-- journaled cost one comparison. A record that is there already stays as it is (only a row whose rev a hand has changed meets one);
-- verify reports it.
create function durable.note(instance bigint, new_rev bigint, what text, at_step text, next_step text, at_visit bigint, at_attempt int,
                             at_round int, claim uuid default null, owner text default null, failure jsonb default null,
                             further jsonb default '{}', commander text default null)
returns void language plpgsql volatile as $$
begin
    insert into durable.journal (instance_id, rev, kind, step, to_step, visit, attempt, claim_id, node, by, error, data)
    values (instance, new_rev, what, at_step, next_step, at_visit, at_attempt, claim, owner, commander, failure,
            nullif(case when at_round = 0 then further else further || jsonb_build_object('round', at_round) end, '{}'))
    on conflict do nothing;
end $$;

-- Checkpoints of projections: they only shorten a replay, and may be deleted at any time.
create table durable.checkpoints (
    thread     text primary key,
    rev        bigint not null,
    format     int not null,
    projection jsonb not null,
    at         timestamptz not null default durable.now()
);

comment on table durable.checkpoints is 'durable_actors: checkpoints of journal projections';

-- judge_siblings (0010; 0002 says how it works and why it is safe), with its records.
create or replace function durable.judge_siblings(
    space text, known text[], gone text[], ks text[], ps smallint[], es timestamptz[], ids bigint[],
    out claim bigint[], out hold bigint[], out leave bigint[]
) language plpgsql volatile as $$
declare
    got boolean[];
    heal text[] := gone;
    verdict text;
    elder smallint;
    healed bigint;
    r record;
begin
    claim := '{}'; hold := '{}'; leave := '{}';
    if ks is null and gone = '{}' then return; end if;
    got := array(
        select pg_try_advisory_xact_lock(hashtextextended(space || chr(1) || u.k, 1))
          from unnest(ks) with ordinality u(k, o) order by u.o);
    for r in  -- a new statement: a fresh snapshot, taken after all the locks
        select u.i, u.k, u.p, u.e, u.o,
               case when u.k = ks[u.o - 1] then null  -- the key's first row has decided
                    when not u.ok then 'busy'
                    when x.id is not null then 'executing'
                    when exists (select 1 from durable.gen_durable y
                                  where y.partition_key = u.k and y.status = 'executing') then 'busy'
                    when exists (select 1 from durable.gen_durable y
                                  where y.partition_key = u.k and y.status = 'runnable'
                                    and y.eligible_at <= durable.now() and durable.keeps_place(y.hold)
                                    and (y.priority, y.eligible_at, y.id) < (u.p, u.e, u.i)
                                    and y.fsm || chr(31) || y.fsm_version || chr(31) || y.step = any (known))
                         then 'earlier'
                    else 'free' end as verdict
          from unnest(ks, ps, es, ids, got) with ordinality u(k, p, e, i, ok, o)
          left join lateral (
              select y.id from durable.gen_durable y
               where u.ok and u.k is distinct from ks[u.o - 1]
                 and y.partition_key = u.k and y.status = 'executing'
                 for no key update skip locked) x on true
         order by u.o
    loop
        if r.verdict is not null then
            verdict := r.verdict;
            if verdict = 'free' then
                claim := claim || r.i;
                continue;
            elsif verdict = 'earlier' then
                select y.hold into elder from durable.gen_durable y
                 where y.partition_key = r.k and y.status = 'runnable' and y.eligible_at <= durable.now() and durable.keeps_place(y.hold)
                   and (y.priority, y.eligible_at, y.id) < (r.p, r.e, r.i)
                   and y.fsm || chr(31) || y.fsm_version || chr(31) || y.step = any (known)
                 order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked;
                if not found then
                    verdict := 'busy';
                elsif elder = 1 then
                    heal := heal || r.k;
                end if;
            end if;
        end if;
        if verdict <> 'busy' then
            hold := hold || r.i;
        else
            leave := leave || r.i;
        end if;
    end loop;
    -- The elder may be held with nothing left to release it: a promotion skips a row that a concurrent pick
    -- has locked and then rejects. Whoever meets such a key offers its first held row again. So does who shelves a row:
    -- it may be the one that a promotion has offered, and the rows held behind it would wait for the sweep.
    if heal <> '{}' then
        with healed as (
            update durable.gen_durable g
               set hold = 0, rev = least(g.rev, 9223372036854775806) + 1, updated_at = durable.now()
             where g.id = any (array(
                select h.id from unnest(heal) u(k)
                 cross join lateral (
                     select y.id from durable.gen_durable y
                      where y.partition_key = u.k and y.status = 'runnable' and y.hold = 1
                      order by y.priority, y.eligible_at, y.id limit 1 for no key update skip locked) h))
            returning case when g.journal >= 3 then durable.note(g.id, g.rev, 'offered', g.step, null, g.visit, g.attempt, g.round) end
        )
        select count(*) into healed from healed;
    end if;
end $$;

-- send_signals (0010; 0003 says how it works), with its records.
create or replace function durable.send_signals(targets bigint[], keys bytea[], names text[], payloads jsonb[], dedups text[])
returns table (ord bigint, target bigint, outcome text, queue text, woken boolean)
language plpgsql volatile as $$
declare
    resolved bigint[];
begin
    resolved := array(
        select coalesce(u.target, k.id)
          from unnest(targets, keys) with ordinality u(target, key, o)
          left join lateral (
              select g.id from durable.gen_durable g where u.target is null and g.unique_guard = u.key) k on true
         order by u.o);
    perform 1 from durable.gen_durable g where g.id = any (resolved) order by g.id for no key update;
    return query
    with input as materialized (
        select u.o, g.id, u.name, u.payload, u.dedup, g.queue, g.status
          from unnest(resolved, names, payloads, dedups) with ordinality u(target, name, payload, dedup, o)
          left join durable.gen_durable g on g.id = u.target and g.finished_at is null
    ), sent as (
        insert into durable.signals as s (target_id, name, payload, dedup_key)
        select i.id, i.name, coalesce(i.payload, 'null'), i.dedup from input i where i.id is not null order by i.o
        on conflict (target_id, dedup_key) where dedup_key is not null do nothing
        returning s.id as signal_id, s.target_id, s.name, s.dedup_key, s.payload
    ), wake as (
        update durable.gen_durable g
           set inbox = true,
               status = case when w.hit then 'runnable' else g.status end,
               hold = case when w.hit then durable.hold_of(g.request) else g.hold end,
               eligible_at = case when w.hit then durable.now() else g.eligible_at end,
               step = case when w.hit then coalesce(g.await_step, g.step) else g.step end,
               await_step = case when w.hit then null else g.await_step end,
               await_deadline = case when w.hit then null else g.await_deadline end,
               rev = case when w.hit then least(g.rev, 9223372036854775806) + 1 else g.rev end,
               updated_at = durable.now()
          from (select b.target_id, y.step, y.status = 'awaiting_signal' and y.awaits && b.names as hit
                  from (select s.target_id, array_agg(s.name) as names from sent s group by s.target_id) b
                  join durable.gen_durable y on y.id = b.target_id) w
         where g.id = w.target_id and (w.hit or not g.inbox)
        returning g.id, w.hit,
                  case when w.hit and g.journal >= 3 then durable.note(
                      g.id, g.rev, 'woken', w.step, g.step, g.visit, g.attempt, g.round, further => jsonb_build_object('signals', (
                          select jsonb_agg(jsonb_build_object('id', b.signal_id, 'name', b.name)
                                           || case when g.journal < 4 then '{}' else jsonb_build_object('payload', b.payload) end
                                           order by b.signal_id)
                            from sent b where b.target_id = g.id))) end
    ), fresh as (
        -- Of several with one new dedup key in one call the first was sent.
        select i.o, row_number() over (partition by i.id, i.dedup order by i.o) as nth,
               exists (select 1 from sent b where b.target_id = i.id and b.dedup_key = i.dedup) as is_new
          from input i where i.dedup is not null
    )
    select i.o, i.id,
           case when i.id is null then 'no_target'
                when i.dedup is null or (f.is_new and f.nth = 1) then 'sent'
                else 'duplicate' end,
           i.queue, coalesce(k.hit, false)
      from input i
      left join fresh f on f.o = i.o
      left join wake k on k.id = i.id
     order by i.o;
end $$;
